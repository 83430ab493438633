"""Describes your own op to Maya: maya run --gpu h100 -- python examples/own_op.py"""

import torch

from maya_core.ops import Call, Platform, Timed, Work, op, streaming

torch.library.define("mylib::route", "(Tensor scores, int experts) -> Tensor")
torch.library.register_fake("mylib::route", lambda scores, experts: scores.new_empty(scores.shape[0], experts))


@op("mylib::route", flops=lambda call: 2 * call["scores"].numel * call["experts"])
def route(call: Call, platform: Platform) -> Work:
    scores = call["scores"]
    work = Work().out(0)
    work.temporary(4 * scores.numel)  # freed when the op ends
    work.launch(streaming("reduction", [scores], call.results, row=scores.sizes[-1]))  # priced by the bytes it moves
    return work.launch(Timed("pick experts", 12e-6 if platform.capability >= 90 else 20e-6))  # as you measured it


print(torch.ops.mylib.route(torch.randn(4096, 128, device="cuda"), 8).shape)
