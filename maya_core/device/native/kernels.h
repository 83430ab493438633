// The few kernels written by hand: those that allocate, move, fill or read memory, and the choices that ATen leaves to
// its CUDA library through dispatch stubs (the attention backend, cuDNN's recurrent networks).
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_abi.h"

namespace maya {

std::unordered_set<std::string> register_handwritten_kernels(
    torch::Library& aten);  // and returns the names of their ops
void restore_stubs();

// The backend that scaled_dot_product_attention uses, decided as in ATen/native/transformers/cuda/sdp_utils.cpp.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool enable_gqa);

void prefer_attention_backends();
void restore_attention_backends();

// The copies from or to host memory that is not pinned, which CUDA stages: the events recorded before each, and its
// bytes.
std::vector<std::pair<int64_t, int64_t>> take_pageable_copies();

void register_rnn_stubs(torch_abi::ReplacedStubs& stubs);

// _foreach_copy_ between host and device, or between two devices: copies one by one. False if all are on one device.
bool copy_between_devices(const c10::IValue& to, const c10::IValue& from, bool non_blocking);

// Replaces the masks among the indices of an indexing op by the indices that they select.
void expand_masks(const at::Tensor& self, c10::IValue& indices);
// Does `self[mask] = number`, and returns false if the indices and value are something else.
bool fill_by_mask(at::Tensor self, const c10::IValue& indices, const at::Tensor& value);

}  // namespace maya
