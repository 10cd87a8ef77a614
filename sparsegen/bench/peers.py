"""Whom sparsegen is measured beside: what each peer is called, whether it is here, and what it cannot do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsegen.bench.case import Case, Inputs
from sparsegen.bench.interleaved import Launch
from sparsegen.errors import InputError

Refuse = Callable[[str, str], None]  # is told the name of what does not work, and why


@dataclass(frozen=True)
class Contender:
    """One launch to time.  It returns out [B, H, Sq, Dv].

    ``setup_ms`` and ``setup_bytes``: what was built before the first call, a block mask, and what it keeps.
    """

    name: str
    launch: Launch
    setup_ms: float = 0.0
    setup_bytes: int = 0


@dataclass(frozen=True)
class Peer:
    """A peer by the name that ``--against`` takes.

    ``module`` must be there and have ``member``; ``features`` are those of ``wanted_features`` that it has.  ``cannot``
    says why it cannot do a case, "" when it can; ``make`` builds its launches.
    """

    name: str
    module: str
    member: str
    features: frozenset[str]
    cannot: Callable[[Case], str]
    make: Callable[[Case, Inputs, Refuse], list[Contender]]

    def missing(self) -> str:
        """Why it is not here, "" when it is.  Imports it."""
        try:
            found = importlib.import_module(self.module)
        except ImportError as error:
            return f"cannot be imported: {error}"
        except Exception as error:  # a package that is broken on this machine is not here
            return f"{self.module} cannot be imported: {type(error).__name__}: {error}"
        return "" if hasattr(found, self.member) else f"{self.module} has no {self.member}"

    def refusal(self, case: Case) -> str:
        """Why it cannot do the case, "" when it can."""
        lacking = [f for f in wanted_features(case) if f not in self.features]
        return f"has no {' and no '.join(lacking)}" if lacking else self.cannot(case)


def wanted_features(case: Case) -> list[str]:
    """What a pattern asks for beyond a mask of arithmetic."""
    p = case.pattern
    asked = {
        "softcap": p.softcap is not None,
        "ALiBi": p.alibi,
        "sink logits": p.sink_logits,
        "null key": p.null_key,
        "rules per head": len(p.rules) > 1,
        "random blocks": any(node.keyword == "random_blocks" for _, node in p.nodes()),
        "float32": case.problem.dtype == "float32",
    }
    return [name for name, wanted in asked.items() if wanted]


# ---- each peer ----


def _flex(names: Sequence[str]) -> Callable[[Case, Inputs, Refuse], list[Contender]]:
    def make(case: Case, inputs: Inputs, refuse: Refuse) -> list[Contender]:
        from sparsegen.bench import torch_peers
        from sparsegen.bench.clock import nbytes

        q, k, v = inputs.q, inputs.k, inputs.v
        if "flex" not in inputs.shared:
            inputs.shared["flex"] = torch_peers.block_mask(case.pattern, q, k)
        mask, mask_ms = inputs.shared["flex"]
        launches = torch_peers.flex(
            case.pattern,
            *(q, k, v),
            modes={name: torch_peers.FLEX[name] for name in names},
            refuse=refuse,
            slopes=inputs.extras.get("alibi_slopes"),
            mask=inputs.shared["flex"],
        )
        lists = [t for t in mask.as_tuple() if hasattr(t, "element_size")]
        return [Contender(n, x, mask_ms, nbytes(*lists)) for n, x in launches.items()]

    return make


def _any_arithmetic(case: Case) -> str:
    return ""


def _sdpa_cannot(case: Case) -> str:
    band = case.band()
    if band is None or band.left is not None or band.right not in (None, 0):
        return "does causal and full masks only"
    if band.right == 0 and case.offset:
        return f"aligns causal masks top left, this one starts at position {case.offset}"
    return ""


def _sdpa(case: Case, inputs: Inputs, refuse: Refuse) -> list[Contender]:
    from sparsegen.bench import torch_peers

    band = case.band()
    assert band is not None, "a peer is asked only for what it can do"
    found = torch_peers.sdpa(
        *(inputs.q, inputs.k, inputs.v),
        causal=band.right == 0,
        scale=case.pattern.scale,
        refuse=refuse,
    )
    return [Contender(name, launch) for name, launch in found.items()]


def _flash4_cannot(case: Case) -> str:
    from sparsegen.bench import flash4

    if case.band() is not None:
        return _bottom_right(case)
    try:
        flash4.mask_text(case)
    except TypeError as error:
        return f"its mask_mod cannot say this mask: {error}"
    return ""


def _bottom_right(case: Case) -> str:
    if case.offset == case.kv_len - case.q_len:
        return ""
    return "aligns bottom right, the pattern top left"


def _flash4(case: Case, inputs: Inputs, refuse: Refuse) -> list[Contender]:
    from sparsegen.bench import flash4

    return [Contender("fa4", *flash4.launch_of(case, inputs))]


def _flash_infer_cannot(case: Case) -> str:
    from sparsegen.bench import flash_infer

    band = case.band()
    if band is None or flash_infer.arguments(band) is None:
        return "does causal and full masks and windows to the left only"
    if case.problem.batch != 1:
        return f"its prefill takes one batch entry, the problem has {case.problem.batch}"
    return _bottom_right(case)


def _flash_infer(case: Case, inputs: Inputs, refuse: Refuse) -> list[Contender]:
    from sparsegen.bench import flash_infer

    return [Contender("flashinfer", flash_infer.launch_of(case, inputs))]


_FLEX_HAS = frozenset({"softcap", "ALiBi", "rules per head", "random blocks", "float32"})
_FLEX_AT = ("torch.nn.attention.flex_attention", "flex_attention")
PEERS: tuple[Peer, ...] = (
    Peer("flex", *_FLEX_AT, _FLEX_HAS, _any_arithmetic, _flex(("flex", "flex USE_TMA"))),
    Peer("flex-max", *_FLEX_AT, _FLEX_HAS, _any_arithmetic, _flex(("flex max-autotune",))),
    Peer("sdpa", "torch.nn.attention", "sdpa_kernel", frozenset({"float32"}), _sdpa_cannot, _sdpa),
    Peer(
        "fa4",
        *("flash_attn.cute.interface", "flash_attn_func"),
        frozenset({"softcap", "sink logits"}),
        *(_flash4_cannot, _flash4),
    ),
    Peer(
        "flashinfer",
        *("flashinfer", "single_prefill_with_kv_cache"),
        frozenset({"softcap"}),
        *(_flash_infer_cannot, _flash_infer),
    ),
)
NAMES = tuple(p.name for p in PEERS)


@dataclass(frozen=True)
class Selection:
    """The peers to measure, and those that are not here: (name, reason)."""

    peers: tuple[Peer, ...]
    missing: tuple[tuple[str, str], ...]


def check_names(names: Sequence[str] | None) -> None:
    """Raises ``InputError`` for a name that no peer has, no name at all, and "none" beside others."""
    if names is None:
        return
    unknown = [n for n in names if n not in (*NAMES, "none")]
    if unknown or not names or ("none" in names and len(names) > 1):
        what = f"unknown peer {unknown[0]!r}" if unknown else "none goes alone"
        raise InputError(f"peers: {what}; allowed: none, or some of {', '.join(NAMES)}")


def select(names: Sequence[str] | None = None) -> Selection:
    """The peers of these names that are here, in the order of ``NAMES``; ``None``: all.  ``["none"]``: no peer.

    Raises ``InputError`` as ``check_names``.
    """
    check_names(names)
    asked = NAMES if names is None else names
    chosen = [p for p in PEERS if p.name in asked]
    why = {p.name: p.missing() for p in chosen}
    return Selection(
        tuple(p for p in chosen if not why[p.name]),
        tuple((n, reason) for n, reason in why.items() if reason),
    )


def contenders(
    case: Case, inputs: Inputs, peers: Sequence[Peer], refuse: Refuse
) -> list[Contender]:
    """All launches of the peers for a case.  What one cannot do, or fails at, is told to ``refuse`` by its name."""
    found: list[Contender] = []
    for peer in peers:
        if reason := peer.refusal(case):
            refuse(peer.name, reason)
            continue
        try:
            found += peer.make(case, inputs, refuse)
        except Exception as error:  # whatever a peer's compiler raises: a missing column, said
            refuse(peer.name, f"{type(error).__name__}: {_first_line(error)}")
    return found


def _first_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"
