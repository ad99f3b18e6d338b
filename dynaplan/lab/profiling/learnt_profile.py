"""A learnt timing in the forms that others read: a profile as if it were measured, and a picture.

A profile holds points between which its readers interpolate, linearly in KV usage within a context and
between contexts. So contexts rise by half octaves, and within each the number of sequences doubles until the
KV cache is full; the largest batch that was seen, and the one beyond which the timing is careful, are points
too. It reaches beyond the engine's request slots: readers take the nearest point outside of those given.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynaplan.engines.timing_model.learnt_timing import LearntTiming, describe
from dynaplan.engines.timing_model.step_timing import MeasuredProfile
from dynaplan.lab.drawing.plots import Curve, Plot

SHORTEST_TOKENS = 64
"""The shortest prompt and context of a profile."""

HALF_OCTAVE = 2**0.5

DRAWN_CONTEXT_TOKENS = 1000
"""The context of each sequence in the picture."""


def profile_of(
    decode: LearntTiming, prefill: LearntTiming, kv_tokens: int, *, decode_gpus: float, prefill_gpus: float
) -> MeasuredProfile:
    """Return the profile of workers with ``kv_tokens`` of KV cache; its origin says what it was learnt from.

    Aggregated workers compute the prompts, too: ``prefill`` is then the same. Workers without GPUs count as
    one each.
    """
    lengths = tuple(float(round(tokens)) for tokens in _rising(SHORTEST_TOKENS, kv_tokens, HALF_OCTAVE))
    ttfts_ms = tuple(prefill.timing().prefill_ms(round(tokens)) for tokens in lengths)
    points = [
        (batch * context / kv_tokens, context, decode.decode_ms(batch, batch * context), batch)
        for context in lengths
        for batch in _batches(decode, kv_tokens / context)
    ]
    return MeasuredProfile(
        prefill_isl=lengths,
        prefill_ttft=ttfts_ms,
        prefill_thpt_per_gpu=tuple(
            1000 * tokens / ttft_ms / (prefill_gpus or 1)
            for tokens, ttft_ms in zip(lengths, ttfts_ms, strict=True)
        ),
        x_kv_usage=tuple(usage for usage, *_ in points),
        y_context_length=tuple(context for _, context, *_ in points),
        z_itl=tuple(itl_ms for *_, itl_ms, _ in points),
        z_thpt_per_gpu=tuple(1000 * batch / itl_ms / (decode_gpus or 1) for *_, itl_ms, batch in points),
        max_kv_tokens=kv_tokens,
        origin=describe(decode),
    )


def _rising(first: float, last: float, factor: float) -> Iterator[float]:
    while first < last:
        yield first
        first *= factor
    yield last


def _batches(learnt: LearntTiming, most: float) -> list[float]:
    bends = (learnt.largest_batch, learnt.known_batch)
    return sorted({*_rising(1.0, max(1.0, most), 2.0), *(each for each in bends if 1 < each < most)})


def plot_of(learnt: LearntTiming, name: str) -> Plot:
    """Return the time of a decode step by its sequences: learnt, with its error, and as the prior has it."""
    most = max(8, round(2 * learnt.known_batch))
    batches = sorted({*map(float, range(1, most + 1)), *(batch for batch, _ in learnt.curve)})
    kv_tokens = [batch * DRAWN_CONTEXT_TOKENS for batch in batches]
    times = list(zip(batches, kv_tokens, strict=True))
    learnt_ms = [(batch, learnt.decode_ms(batch, kv)) for batch, kv in times]
    seen = {batch for batch, _ in learnt.curve}
    return Plot(
        f"{name}: a step with {DRAWN_CONTEXT_TOKENS:,} tokens of context for each sequence",
        "sequences in a step",
        "ms",
        [
            Curve("learnt", learnt_ms, has_marks=False),
            Curve("seen", [point for point in learnt_ms if point[0] in seen], has_line=False),
            *(
                Curve(f"{sign:+.0%}", [(batch, ms * (1 + sign)) for batch, ms in learnt_ms], has_marks=False)
                for sign in (learnt.error, -learnt.error)
            ),
            Curve(
                "prior", [(batch, learnt.prior.decode_ms(batch, kv)) for batch, kv in times], has_marks=False
            ),
        ],
        limit=(learnt.largest_batch, "most that was seen"),
    )
