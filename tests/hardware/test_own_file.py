"""The user's own hardware file: what it can change, where it is found, and the messages for mistakes in it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maya_core.errors import MayaError
from maya_core.hardware.catalog import (
    catalog,
    default_node,
    find_gpu,
    find_node,
    gpus,
    hardware_file,
    use_hardware_file,
)
from maya_core.hardware.cluster import cluster, gpu_hour_quotes

Own = Callable[[str], Path]


def test_a_gpu_derived_from_another(own: Own) -> None:
    own('[gpus.my-h100]\nbase = "h100"\npower_limit_w = 500\nmemory_bandwidth_bytes_per_s = "3TB/s"\n')
    mine, shipped = find_gpu("My H100"), find_gpu("h100")
    assert (mine.power_limit_w, mine.tdp_w) == (500, 700)
    assert mine.memory_bandwidth_bytes_per_s == 3e12
    assert mine.own == ("power_limit_w", "memory_bandwidth_bytes_per_s")
    assert mine.base == "h100"
    assert mine.aliases == ()
    assert mine.sources == shipped.sources
    changed = {"name", "aliases", "base", "own", "power_limit_w", "memory_bandwidth_bytes_per_s"}
    assert mine.model_dump(exclude=changed) == shipped.model_dump(exclude=changed)
    assert shipped.power_limit_w == 700


def test_a_shipped_gpu_is_changed_by_its_name(own: Own) -> None:
    own('[gpus.a100]\nmemory_bytes = "79.32GiB"\npeak_flops = { bfloat16 = "280TFLOP/s" }\n')
    changed = find_gpu("a100-80gb")
    assert changed.memory_bytes == int(79.32 * 2**30)
    assert changed.peak_flops["bfloat16"] == 280e12
    assert changed.peak_flops["float32"] == 19.5e12  # the others stay
    assert "a100-sxm" in changed.aliases


def test_less_tdp_lowers_the_limit_that_was_not_given(own: Own) -> None:
    own('[gpus.slow]\nbase = "h100"\ntdp_w = 350\n')
    assert find_gpu("slow").power_limit_w == 350


def test_entries_derive_from_the_users_own_too(own: Own) -> None:
    own('[gpus.one]\nbase = "h100"\npower_limit_w = 500\n[gpus.two]\nbase = "one"\nsms = 100\n')
    two = find_gpu("two")
    assert (two.power_limit_w, two.sms, two.base) == (500, 100, "h100")
    assert set(two.own) == {"power_limit_w", "sms"}
    assert default_node(two).name == "hgx-h100"


def test_a_gpu_from_nothing(own: Own) -> None:
    text = "\n".join(
        f"{field} = {value!r}"
        for field, value in find_gpu("rtx-4090")
        .model_dump(exclude={"name", "aliases", "sources", "base", "own"})
        .items()
        if not isinstance(value, tuple | dict)
    )
    own(f"[gpus.mine]\n{text}\ncompute_capability = [8, 9]\npeak_flops = {{ float32 = 1e12 }}\n")
    assert find_gpu("mine").training_peak == 1e12
    assert find_gpu("mine").sources == {}
    assert cluster("mine", 4).topology == "pcie"


def test_a_node_network_and_prices_of_ones_own(own: Own) -> None:
    own("""
[networks.our-fabric]
base = "infiniband-ndr"
efficiency = 0.8

[nodes.our-node]
base = "hgx-h100"
nics = 4
network = "our-fabric"
default = true

[[prices]]
gpu = "h100"
provider = "Ours"
usd_per_hour = 1.95
""")
    ours = cluster("h100", 8, nodes=2)
    assert ours.node.name == "our-node"
    assert ours.nics_per_node == 4
    assert ours.network.efficiency == 0.8
    assert ours.price_per_hour() == pytest.approx(1.95 * 16)  # one's own price goes before cheaper ones
    assert ours.price_per_hour("ours") == ours.price_per_hour()
    assert ours.price_per_hour("runpod") == pytest.approx(3.29 * 16)
    assert gpu_hour_quotes(find_gpu("h100"))[0].price.own


def test_the_example_of_the_docs(own: Own) -> None:
    text = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()
    own(textwrap.dedent(text.split("An example:")[1].split("Then `maya run")[0]))
    ours = cluster("our-h100", 8, nodes=4)
    assert (ours.gpu.power_limit_w, ours.node.name, ours.network.name) == (500, "our-node", "our-fabric")
    assert ours.network.latency_s == pytest.approx(7e-6)
    assert ours.price_per_hour() == pytest.approx(1.95 * 32)
    assert find_gpu("a100").peak_flops["bfloat16"] == 290e12


def test_a_derived_node_does_not_become_the_default(own: Own) -> None:
    own('[nodes.our-node]\nbase = "hgx-h100"\nnics = 4\n')
    assert cluster("h100").node.name == "hgx-h100"
    assert find_node("our-node").nics == 4
    assert find_node("dgx-h100").nics == 8


def test_a_node_priced_by_the_user(own: Own) -> None:
    own('[[prices]]\nnode = "P5.48xlarge"\nprovider = "aws"\nusd_per_hour = 30\n')
    assert cluster(node="p5.48xlarge", nodes=2).price_per_hour() == 60


@pytest.mark.parametrize(
    ("text", "problem", "advice"),
    [
        (
            '[gpus.my-h100]\nbase = "h100"\npower_limit_w = -5\n',
            "hardware.toml: gpus.my-h100: power_limit_w must be greater than 0, not -5.",
            "",
        ),
        (
            '[gpus.my-h100]\nbase = "h100"\npower_limit = 500\n',
            "hardware.toml: gpus.my-h100: unknown field 'power_limit'.",
            "Did you mean 'power_limit_w'?",
        ),
        (
            '[gpus.x]\nbase = "h100"\nmemory_bytes = "80 gigs"\n',
            "hardware.toml: gpus.x: memory_bytes must be a size: a number of bytes, or like '80GiB' or '80GB', not '80 gigs'.",
            "",
        ),
        (
            '[gpus.x]\nbase = "h100"\nmemory_bandwidth_bytes_per_s = "3.35TB"\n',
            "hardware.toml: gpus.x: memory_bandwidth_bytes_per_s must be a rate: a number of bytes per second, "
            "or like '3.35TB/s' or '400Gb/s', not '3.35TB'.",
            "",
        ),
        (
            '[gpus.x]\nbase = "h100"\nsms = 1.5\n',
            "hardware.toml: gpus.x: sms must be a whole number, not 1.5.",
            "",
        ),
        (
            '[gpus.x]\nbase = "h100"\narchitecture = "hoper"\n',
            "hardware.toml: gpus.x: architecture must be 'volta', 'turing', 'ampere', 'ada', 'hopper' or 'blackwell', not 'hoper'.",
            "",
        ),
        (
            '[gpus.x]\nbase = "h100"\npeak_flops = { bf16 = 1e12 }\n',
            "hardware.toml: gpus.x: peak_flops has no 'bf16': it is by bfloat16, float16, tf32, float32, float64, float8, float4, int8.",
            "",
        ),
        (
            '[gpus.x]\nbase = "h100"\npeak_flops = { bfloat16 = 0 }\n',
            "hardware.toml: gpus.x: peak_flops.bfloat16 must be greater than 0, not 0.",
            "",
        ),
        (
            '[gpus.x]\nbase = "h100"\noutside_bytes = "80GiB"\n',
            "hardware.toml: gpus.x: outside_bytes must be less than memory_bytes (85017493504).",
            "",
        ),
        ('[gpus.x]\nbase = "h10"\n', "hardware.toml: gpus.x: base = 'h10' is not known.", "Did you mean 'h100'?"),
        ("[gpus.x]\nbase = 5\n", "hardware.toml: gpus.x: base must be the name of an entry, not 5.", ""),
        (
            '[gpus.x]\nbase = "y"\n[gpus.y]\nbase = "x"\n',
            "hardware.toml: gpus.x: derives from itself: x -> y -> x.",
            "",
        ),
        (
            "[gpus.h100-sxm]\nsms = 100\n",
            "hardware.toml: gpus.h100-sxm: 'h100-sxm' is another name of 'h100'.",
            "Write [gpus.h100] to change that entry, or choose another name.",
        ),
        ("[gpu.x]\nsms = 5\n", "hardware.toml: unknown section 'gpu'.", "Did you mean 'gpus'?"),
        ("gpus = 5\n", "hardware.toml: 'gpus' has entries of the wrong form.", "Write each as [gpus.NAME]."),
        ("[gpus]\nx = 5\n", "hardware.toml: 'gpus' has entries of the wrong form.", "Write each as [gpus.NAME]."),
        ("[prices]\nx = 5\n", "hardware.toml: 'prices' has entries of the wrong form.", "Write each as [[prices]]."),
        (
            '[nodes.x]\nbase = "hgx-h100"\nnetwork = "infiniband-nrd"\n',
            "hardware.toml: nodes.x: network: 'infiniband-nrd' is not known.",
            "Did you mean 'infiniband-ndr'?",
        ),
        (
            '[nodes.x]\nbase = "hgx-h100"\nnvls = "maybe"\n',
            "hardware.toml: nodes.x: nvls must be true or false, not 'maybe'.",
            "",
        ),
        (
            '[nodes.x]\nbase = "hgx-h100"\npcie_generation = 9\n',
            "hardware.toml: nodes.x: pcie_generation must be at most 6, not 9.",
            "",
        ),
        (
            '[networks.x]\nbase = "efa-v2"\nefficiency = 80\n',
            "hardware.toml: networks.x: efficiency must be at most 1, not 80.",
            "",
        ),
        (
            '[[prices]]\ngpu = "h100"\nprovider = "ours"\nusd_per_hour = 0\n',
            "hardware.toml: price 1: usd_per_hour must be greater than 0, not 0.",
            "",
        ),
        (
            '[[prices]]\nprovider = "ours"\nusd_per_hour = 2\n',
            "hardware.toml: price 1: a price is for a `node` or for a `gpu`: give one of them.",
            "",
        ),
        ('[[prices]]\ngpu = "h100"\nprovider = "ours"\n', "hardware.toml: price 1: usd_per_hour is missing.", ""),
        (
            '[[prices]]\ngpu = "h10"\nprovider = "ours"\nusd_per_hour = 2\n',
            "hardware.toml: price 1: gpu: 'h10' is not known.",
            "Did you mean 'h100'?",
        ),
    ],
)
def test_what_is_wrong_is_said_with_file_entry_and_field(own: Own, text: str, problem: str, advice: str) -> None:
    own(text)
    with pytest.raises(MayaError) as error:
        gpus()
    assert error.value.problem == problem
    assert error.value.advice == advice


def test_missing_fields_are_named(own: Own) -> None:
    own('[gpus.new]\ndriver_name = "NVIDIA New"\narchitecture = "hopper"\n')
    with pytest.raises(MayaError) as error:
        gpus()
    assert error.value.problem.startswith("hardware.toml: gpus.new: compute_capability, memory_bytes, ")
    assert error.value.problem.endswith(" are missing.")
    assert "base = " in error.value.advice


def test_a_syntax_error_names_its_line(own: Own) -> None:
    own("[gpus.x]\nbase = \n")
    with pytest.raises(MayaError, match=r"hardware.toml: not valid TOML: .*line 2"):
        gpus()


def test_a_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAYA_HARDWARE", str(tmp_path / "no.toml"))
    with pytest.raises(MayaError, match=r"the hardware file .*no.toml does not exist"):
        gpus()


def test_where_the_file_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert hardware_file() is None
    usual = tmp_path / "config" / "maya" / "hardware.toml"
    usual.parent.mkdir(parents=True)
    usual.write_text('[gpus.usual]\nbase = "h100"\n')
    assert hardware_file() == usual
    assert find_gpu("usual").base == "h100"
    named = tmp_path / "named.toml"
    named.write_text('[gpus.named]\nbase = "a100"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAYA_HARDWARE", "named.toml")
    assert hardware_file() == named
    assert find_gpu("named").base == "a100"
    assert "usual" not in gpus()


def test_processes_in_other_folders_find_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[gpus.mine]\nbase = "h100"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAYA_HARDWARE", "")
    use_hardware_file(Path("mine.toml"))
    assert os.environ["MAYA_HARDWARE"] == str(tmp_path / "mine.toml")
    monkeypatch.chdir("/")
    assert "mine" in gpus()


def test_a_changed_file_is_read_again(own: Own) -> None:
    path = own('[gpus.x]\nbase = "h100"\nsms = 100\n')
    assert find_gpu("x").sms == 100
    path.write_text('[gpus.x]\nbase = "h100"\nsms = 101\n')
    assert find_gpu("x").sms == 101


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    base=st.sampled_from(["h100", "a100-80gb", "t4", "rtx-4090"]),
    watts=st.floats(1, 2000),
    gib=st.integers(2, 500),
    terabytes=st.floats(0.1, 20),
)
def test_derived_gpus_have_what_was_given_and_else_what_their_base_has(
    own: Own, base: str, watts: float, gib: int, terabytes: float
) -> None:
    own(
        f'[gpus.mine]\nbase = "{base}"\npower_limit_w = {watts!r}\nmemory_bytes = "{gib}GiB"\n'
        f'memory_bandwidth_bytes_per_s = "{terabytes!r}TB/s"\n'
    )
    mine, shipped = find_gpu("mine"), find_gpu(base)
    assert mine.power_limit_w == watts
    assert mine.memory_bytes == gib * 2**30
    assert mine.memory_bandwidth_bytes_per_s == pytest.approx(terabytes * 1e12)
    assert mine.peak_flops == shipped.peak_flops
    assert len(catalog().gpus) == 28
