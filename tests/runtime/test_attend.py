"""Every refusal of a call by its full text, on tensors that only claim to be on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from sparsegen.errors import InputError, UnsupportedError
from tests.runtime.calls import (
    EVERYTHING,
    attend_of,
    extras,
    qkv,
    strided,
    tensor,
)

pytestmark = pytest.mark.one_triton  # kernels are stand-ins


@pytest.fixture(autouse=True)
def no_gpu_needed():
    with FakeTensorMode():
        yield


# ---------------------------------------------------------------------- tensors that do not fit
TENSORS = [
    ({"q": lambda: tensor(4, 8, 16)}, "q must be [batch, heads, length, dim], got [4, 8, 16]"),
    ({"v": lambda: tensor(8)}, "v must be [batch, heads, length, dim], got [8]"),
    (
        {"k": lambda: strided(1, 2, 8, 16, stride=(512, 256, 32, 2))},
        "the last dim of k must be contiguous (stride 1), got stride 2; use .contiguous()",
    ),
    (
        {"v": lambda: strided(1, 2, 8, 16, stride=(256, 128, 1, 8))},
        "the last dim of v must be contiguous (stride 1), got stride 8; use .contiguous()",
    ),
    (
        {"k": lambda: tensor(1, 2, 8, 16, dtype=torch.bfloat16)},
        "q, k and v must have one dtype, got torch.float16, torch.bfloat16, torch.float16",
    ),
    (
        {"v": lambda: tensor(1, 2, 8, 16, device="cpu")},
        "q, k and v must be on one device, got cuda:0, cuda:0, cpu",
    ),
    (
        {"k": lambda: tensor(2, 2, 8, 16), "v": lambda: tensor(2, 2, 8, 16)},
        "q, k and v must have one batch size, got 1, 2, 2",
    ),
    (
        {"v": lambda: tensor(1, 2, 9, 16)},
        "k and v must have the same heads and length, got [1, 2, 8, 16] and [1, 2, 9, 16]",
    ),
    (
        {"q": lambda: tensor(1, 4, 8, 24)},
        "q and k must have the same dim, got 24 and 16",
    ),
    (
        {"q": lambda: tensor(1, 3, 8, 16)},
        "query heads must be a multiple of key heads, got 3 and 2",
    ),
    (
        {"k": lambda: tensor(1, 0, 8, 16), "v": lambda: tensor(1, 0, 8, 16)},
        "query heads must be a multiple of key heads, got 4 and 0",
    ),
    (
        {"q": lambda: np.zeros((1, 4, 8, 16), np.float16)},
        "q must be a torch.Tensor of bfloat16, float16 or float32, got numpy.ndarray",
    ),
    (
        {"v": lambda: [[1.0]]},
        "v must be a torch.Tensor of bfloat16, float16 or float32, got list",
    ),
    (
        {name: functools.partial(tensor, 1, 4, 8, 16, dtype=torch.int32) for name in "qkv"},
        "q must be bfloat16, float16 or float32, got int32",
    ),
]


@pytest.mark.parametrize(("changes", "message"), TENSORS, ids=[t[1][:50] for t in TENSORS])
def test_tensors_that_do_not_fit(changes: dict, message: str) -> None:
    attend, kernel = attend_of()
    with pytest.raises(InputError) as error:
        attend(**qkv(**changes))
    assert str(error.value) == message and isinstance(error.value, ValueError)
    assert not kernel.calls


def test_other_arguments_that_are_no_tensors() -> None:
    """Said by name, whatever else the call has, and not by an attribute that numpy lacks."""
    attend, kernel = attend_of()
    for name in ("q_lengths", "kv_starts", "kv_lengths", "alibi_slopes", "sink_logits", "out"):
        with pytest.raises(InputError, match=f"^{name} must be a torch.Tensor, got ndarray$"):
            attend(**qkv(), **{name: np.ones(4, np.float32)})
    with pytest.raises(InputError, match=r"^null_key\[1\] must be a torch.Tensor, got ndarray$"):
        attend(**qkv(), null_key=(tensor(2, 16), np.ones((2, 16))))
    assert not kernel.calls


def test_autocast_casts_no_integers() -> None:
    """Tensors as they come, no subclass: those are looked at before anything else."""
    with unset_fake_temporarily():
        attend, _ = attend_of()
        q, k = (torch.zeros(1, heads, 8, 16, dtype=torch.float16) for heads in (4, 2))
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(InputError, match="^the compiled kernel runs on a GPU"):
                attend(q, k, k)
            with pytest.raises(InputError, match="^k must be .* got int64$"):
                attend(q, k.long(), k)


def test_a_refused_layout_is_refused_again() -> None:
    attend, _ = attend_of()
    for _ in range(2):
        with pytest.raises(InputError, match="multiple of key heads"):
            attend(**qkv(q=tensor(1, 3, 8, 16)))
    # the same shapes, first fine, then with another last stride
    attend(**qkv())
    with pytest.raises(InputError, match="last dim of k"):
        attend(**qkv(k=strided(1, 2, 8, 16, stride=(512, 256, 32, 2))))


def test_tensors_on_the_cpu() -> None:
    on_cpu = {n: tensor(1, h, 8, 16, device="cpu") for n, h in (("q", 4), ("k", 2), ("v", 2))}
    attend, _ = attend_of()
    with pytest.raises(InputError) as error:
        attend(**on_cpu)
    assert str(error.value) == (
        "the compiled kernel runs on a GPU and the tensors are on cpu; "
        "sparsegen.compile(pattern, backend='reference') runs on any device"
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((1, 2, 8, 16), torch.float64, "dtype must be bfloat16 or float16 or float32, got 'float64'"),
        ((1, 2, 8, 16), torch.float8_e4m3fn, "dtype must be .*, got 'float8_e4m3fn'"),
        ((1, 2, 8, 0), torch.float16, "head_dim must be an integer from 1 to 4096, got 0"),
    ],
)  # fmt: skip
def test_what_no_problem_can_be(shape: tuple, dtype: Any, words: str) -> None:
    attend, _ = attend_of()
    with pytest.raises(InputError, match="^no kernel takes these tensors: " + words):
        attend(*(tensor(*shape, dtype=dtype) for _ in range(3)))


def test_a_loaded_artifact_stays_inside_its_problem() -> None:
    attend, _ = attend_of()
    with pytest.raises(InputError) as error:
        attend(**qkv(v=tensor(1, 2, 8, 32)))
    assert str(error.value) == (
        "this artifact was built for float16, head_dim 16, heads 4:2, the tensors are float16, head_dim 16, "
        "value_dim 32, heads 4:2; build it with sparsegen.compile or `sparsegen warm`"
    )


# ---------------------------------------------------------------------- keywords
def test_unknown_and_missing_keywords_are_type_errors() -> None:
    attend, _ = attend_of()
    with pytest.raises(TypeError, match="unexpected keyword argument 'cu_seqlens'"):
        attend(**qkv(), cu_seqlens=[0, 8])
    with pytest.raises(
        TypeError, match=r"^pattern 'p' takes no 'sink_logits': its file does not ask for it$"
    ):
        attend(**qkv(), sink_logits=tensor(4, dtype=torch.float32))
    for name, wanted in EVERYTHING.items():
        keyword = "alibi_slopes" if name == "alibi" else name
        attend, _ = attend_of(**{name: wanted})
        for partial in (False, True):
            with pytest.raises(TypeError, match=f"^pattern 'p' needs the keyword '{keyword}'$"):
                attend(**qkv(), partial=partial)


EXTRAS = [
    (
        {"alibi_slopes": lambda: tensor(2, dtype=torch.float32)},
        "alibi_slopes must be contiguous float32 [4] on cuda:0, got torch.float32 [2] on cuda:0",
    ),
    (
        {"sink_logits": lambda: tensor(4)},
        "sink_logits must be contiguous float32 [4] on cuda:0, got torch.float16 [4] on cuda:0",
    ),
    (
        {"sink_logits": lambda: tensor(4, dtype=torch.float32, device="cpu")},
        "sink_logits must be contiguous float32 [4] on cuda:0, got torch.float32 [4] on cpu",
    ),
    ({"null_key": lambda: tensor(2, 16)}, "null_key must be a pair (k [Hkv, D], v [Hkv, Dv])"),
    (
        {"null_key": lambda: (tensor(4, 16), tensor(2, 16))},
        "null_key[0] must be contiguous torch.float16 [2, 16] on cuda:0, got torch.float16 [4, 16] on cuda:0",
    ),
    (
        {"null_key": lambda: (tensor(2, 16), strided(2, 16, stride=(1, 2)))},
        "null_key[1] must be contiguous torch.float16 [2, 16] on cuda:0, got torch.float16 [2, 16] on cuda:0",
    ),
]


@pytest.mark.parametrize(("changes", "message"), EXTRAS, ids=[e[1][:60] for e in EXTRAS])
def test_learned_extras_that_do_not_fit(changes: dict, message: str) -> None:
    attend, _ = attend_of(**EVERYTHING)
    attend(**qkv(), **extras())
    with pytest.raises(InputError) as error:
        attend(**qkv(), **extras(**changes))
    assert str(error.value) == message


KEYWORDS = [
    (
        {"q_lengths": lambda: tensor(2, dtype=torch.int32)},
        "q_lengths must be int32 [1] on cuda:0, got torch.int32 [2] on cuda:0",
    ),
    (
        {"kv_lengths": lambda: tensor(1, dtype=torch.int64)},
        "kv_lengths must be int32 [1] on cuda:0, got torch.int64 [1] on cuda:0",
    ),
    (
        {"kv_starts": lambda: tensor(1, dtype=torch.int32, device="cpu")},
        "kv_starts must be int32 [1] on cuda:0, got torch.int32 [1] on cpu",
    ),
    (
        {"out": lambda: tensor(1, 4, 8, 8)},
        "out must be torch.float16 [1, 4, 8, 16] on cuda:0, got torch.float16 [1, 4, 8, 8] on cuda:0",
    ),
    (
        {"out": lambda: tensor(1, 4, 8, 16, dtype=torch.float32)},
        "out must be torch.float16 [1, 4, 8, 16] on cuda:0, got torch.float32 [1, 4, 8, 16] on cuda:0",
    ),
    (
        {"out": lambda: strided(1, 4, 8, 16, stride=(512, 128, 1, 8))},
        "the last dim of out must be contiguous (stride 1)",
    ),
    ({"variant": lambda: "quick"}, "variant must be one of fast, pointers, general, got 'quick'"),
    ({"q_start": lambda: 1.5}, "q_start must be an integer within 2^36, got 1.5"),
    ({"q_start": lambda: 1 << 40}, "q_start must be an integer within 2^36, got 1099511627776"),
    ({"k_start": lambda: -1}, "k_start must be 0 or more, got -1: keys have no positions below 0"),
    ({"k_start": lambda: None}, "k_start must be an integer within 2^36, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), KEYWORDS, ids=[k[1][:60] for k in KEYWORDS])
def test_keywords_that_do_not_fit(given: dict, message: str) -> None:
    attend, kernel = attend_of()
    with pytest.raises(InputError) as error:
        attend(**qkv(), **{name: make() for name, make in given.items()})
    assert str(error.value) == message
    assert not kernel.calls


def test_more_keys_than_a_grid_has_cells() -> None:
    attend, _ = attend_of({"axial": {"shape": [4, 2]}})
    attend(**qkv())
    with pytest.raises(
        InputError, match=r"^p: mask.axial.shape has 8 cells, too few for kv_len 9$"
    ):
        attend(**qkv(8, 9))
    with pytest.raises(InputError, match="too few for kv_len 8 from k_start 1"):
        attend(**qkv(), k_start=1)


# ---------------------------------------------------------------------- gradients
NO_BACKWARD = (
    "this callable of 'p' was made without gradients: call under torch.no_grad(), "
    "or make it with sparsegen.compile"
)


@pytest.mark.parametrize("which", ["q", "k", "v", "sink_logits", "alibi_slopes", "null_key", "out"])
def test_a_gradient_is_refused_and_never_dropped(which: str) -> None:
    """A learned sink that got no gradient trains to nothing without a word (CASES B22); see test_training.py."""
    attend, kernel = attend_of(**EVERYTHING)
    given = qkv() | extras() | ({"out": tensor(1, 4, 8, 16)} if which == "out" else {})
    (given[which][1] if which == "null_key" else given[which]).requires_grad_()
    with pytest.raises(UnsupportedError) as error:
        attend(**given)
    said = {"out": "out= takes no result", "alibi_slopes": "alibi_slopes get no gradient"}
    assert str(error.value).startswith(said.get(which, NO_BACKWARD)) and not kernel.calls
    with torch.no_grad():
        attend(**given)
    assert len(kernel.calls) == 1
