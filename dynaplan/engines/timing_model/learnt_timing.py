"""The time of an engine's step, learnt from what the engine counts while it serves.

**Model.** A step that decodes b sequences with kv tokens of context among them, and computes t tokens of
prompts of which s begin, takes

    a + d1 b + d2 kv + m t + F s        ms

a is the reading of the weights, d1 the work of each sequence besides its context, d2 the reading of one token
of KV, m the computing of one token of a prompt, F what beginning a prompt costs. It is the straight form of
``step_timing.py``. Over a span in which the engine was busy it sums to one equation,

    busy ms = a steps + d1 decoded tokens + d2 (steps x kv tokens) + m prompt tokens + F prompts

and all but the coefficients are counted. Latencies are not used: a TTFT does not say what shared its steps.

**Regression.** Weighted least squares with a Gaussian prior (ridge regression; Bishop, Pattern Recognition
and Machine Learning, 2006, section 3.3): a coefficient has the prior's value with a deviation of ``SPREAD``
times it, an equation the weight 1 / (``NOISE``^2 x foretold ms x measured ms). The clock ends a span, so what
scatters is how many steps it holds: weighed so, the foretold times sum to the measured ones. Sums of squares
fade with a half-life of ``HALF_LIFE_EQUATIONS``, the prior does not: what is no longer seen returns to it. No
coefficient is below 0: the most negative is held at 0 and the rest solved again (as the active sets of Lawson
and Hanson, 1974). An equation whose time exceeds the expected one by far counts less (Huber, 1964): the
engine was idle for a part of the span.

**Error.** Every equation is foretold before it is learnt. What sizing needs is the mean: seconds may be a
quarter off, because other programs took the processor, and the hour right. So seconds of a kind are judged
together: the error is sum |foretold ms - measured ms| / sum measured ms, each difference that of all seconds
of a kind, which fade with a half-life of ``ERROR_HALF_LIFE_EQUATIONS``. In it noise cancels, and a bias
stays. A kind is a half octave of batches, of seconds that mostly decode or mostly compute prompts: a model
that thinks small batches too slow and large ones too fast is wrong about both. ``prior_error`` is that of the
prior, or of the profile that it comes from: a profile is believed while it foretells better.

**Where the line is wrong, and what is done.**

- CUDA graphs pad a batch to the next captured size, and mixtures of experts read more weights the more
  sequences there are: the time has steps or bends in b. ``curve`` holds measured over foretold time of
  decoding by batch, in half octaves, each drawn to 1 by ``CURVE_PRIOR_EQUATIONS``.
- Chunked prefill makes m t a sum over chunks; attention to what is computed already (the square of the
  prompt) is in m as a mean over the lengths seen. Lengths that change move m within a half-life.
- KV in use is read once a second. Where requests are shorter and reading KV is most of a step, that says
  little of what their steps read, and m takes a part of d2: an aggregated engine's prompt is thought up to
  twice as long, while a second as a whole is foretold within 5 %.
- Speculative decoding emits several tokens a step: ``decoded tokens`` are then more than sequences, d1 is the
  time of a token, and ITL is foretold for the acceptance seen.
- A shared GPU slows all coefficients together: the regression follows within a half-life, the error says so.
- Prompts out of a prefix cache are not counted as computed, so they cost nothing here either.
- What was not seen is not promised: beyond ``KNOWN_FACTOR`` times the largest batch the time rises by the
  larger of the line's slopes and of the prior's worse side: its slopes times ``WORSE_SIDE``, brought to the
  level that was learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.util.documents import check_types

NOISE = 0.1
"""The usual error of one equation, as a part of its time."""

SPREAD = 10.0
"""The deviation of a guessed coefficient, as a multiple of it: one that is too small holds on the longest."""

MEASURED_SPREAD = 0.5
"""That of one that was measured, though perhaps elsewhere: of a profile, or of what was learnt last time."""

HALF_LIFE_EQUATIONS = 300.0
"""Equations after which one counts half: five minutes of a worker that is always busy."""

HUBER = 6.0
"""Usual errors beyond which an equation's pull on the coefficients grows no more."""

ERROR_HALF_LIFE_EQUATIONS = 30.0
"""Equations after which an error counts half."""

REMEMBERED_EQUATIONS = 5
"""As which the error of an earlier run counts: some seconds that contradict it are enough to refuse it."""

MIN_EQUATIONS = 20
"""Equations before which an error says nothing."""

USABLE_ERROR = 0.15
"""The error below which workers are counted by what was learnt."""

BETTER_FACTOR = 0.7
"""A profile gives way once the learnt error is below so much of its own, and its own is above ``NOISE``."""

KNOWN_FACTOR = 1.5
"""What is foretold by the line alone reaches to this multiple of the largest batch that was seen."""

WORSE_SIDE = 1.5
"""The factor on a prior's slopes where nothing was seen."""

CURVE_PRIOR_EQUATIONS = 10.0
"""The weight, in equations, with which each point of the curve is drawn to 1."""

MOST_SEQUENCES = 1024
"""At most so many are reckoned with where the engine does not tell its request slots."""

MIN_SHARE = 1e-9

SECOND_MS = 1000.0

Vector = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What an engine did in a span: one equation. ``busy_ms`` is the time that it was at work.

    ``kv_token_steps`` is the sum over steps of the tokens of context that they read.
    """

    busy_ms: float
    steps: float
    decoded_tokens: float
    kv_token_steps: float
    prompt_tokens: float
    prompts: float

    @property
    def features(self) -> Vector:
        return self.steps, self.decoded_tokens, self.kv_token_steps, self.prompt_tokens, self.prompts

    @property
    def batch(self) -> float:
        """The mean number of sequences that a step decoded."""
        return self.decoded_tokens / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class StepLine:
    """The coefficients, ms: of a step, of a sequence in it, of a token of context or prompt, of a prompt."""

    step_ms: float
    sequence_ms: float
    kv_token_ms: float
    prompt_token_ms: float
    prompt_ms: float

    @property
    def coefficients(self) -> Vector:
        return self.step_ms, self.sequence_ms, self.kv_token_ms, self.prompt_token_ms, self.prompt_ms

    def decode_ms(self, sequences: float, kv_tokens: float) -> float:
        return self.step_ms + self.sequence_ms * sequences + self.kv_token_ms * kv_tokens

    @classmethod
    def through(cls, timing: StepTiming, kv_tokens: int) -> StepLine:
        """Return the line through a profile's times of batches of 1 and 8, two contexts, and two prompts."""
        context = max(1.0, min(1000.0, kv_tokens / 16))
        few, many = timing.decode_ms(1, context), timing.decode_ms(8, 8 * context)
        deep = timing.decode_ms(8, 16 * context)
        kv_token_ms = max(0.0, (deep - many) / (8 * context))
        sequence_ms = max(0.0, (many - few) / 7 - kv_token_ms * context)
        step_ms = max(MIN_SHARE, few - sequence_ms - kv_token_ms * context)
        begin_ms = timing.prefill_ms(0)
        prompt_token_ms = max(0.0, timing.prefill_ms(1000) - begin_ms) / 1000
        return cls(step_ms, sequence_ms, kv_token_ms, prompt_token_ms, max(0.0, begin_ms - step_ms))


UNKNOWN_MACHINE = StepLine(10.0, 0.1, 1e-4, 0.05, 5.0)
"""The prior where not even the size of the model is known: a GPU with a model of some 8 B parameters."""


@dataclass(frozen=True, slots=True)
class LearntTiming:
    """What is known of one kind of worker's steps; plain data, which decisions record.

    ``equations`` and ``steps`` are those seen so far, ``largest_batch`` the most sequences in a step.
    ``curve`` are (batch, factor on the time of decoding), rising. ``kv_tokens`` and ``request_slots`` are the
    engine's own sizes as it told them, 0 where it does not.
    """

    line: StepLine
    prior: StepLine
    error: float = 1.0
    prior_error: float = 1.0
    equations: int = 0
    steps: int = 0
    largest_batch: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    kv_tokens: int = 0
    request_slots: int = 0

    @property
    def is_usable(self) -> bool:
        return self.equations >= MIN_EQUATIONS and self.error < USABLE_ERROR

    @property
    def beats_its_prior(self) -> bool:
        """True when it is usable, and predicts clearly better than the profile that it began with."""
        return self.is_usable and self.prior_error > max(NOISE, self.error / BETTER_FACTOR)

    @property
    def known_batch(self) -> float:
        return KNOWN_FACTOR * max(1.0, self.largest_batch)

    def decode_ms(self, sequences: float, kv_tokens: float) -> float:
        """Return the ms of a step that only decodes.

        Beyond the batches that were seen it grows as fast as learnt, or as the prior has it, whichever is
        more.
        """
        known = min(sequences, self.known_batch)
        known_kv = kv_tokens * known / sequences if sequences else 0.0
        line_ms = self.line.decode_ms(known, known_kv) * interpolated(self.curve, known)
        if sequences <= known:
            return line_ms
        line, prior_ms = self.line, self.prior.decode_ms(known, known_kv)
        worse = WORSE_SIDE * line_ms / prior_ms if prior_ms else 0.0
        sequence_ms = max(line.sequence_ms, worse * self.prior.sequence_ms)
        kv_token_ms = max(line.kv_token_ms, worse * self.prior.kv_token_ms)
        return line_ms + sequence_ms * (sequences - known) + kv_token_ms * (kv_tokens - known_kv)

    def most_sequences(self, itl_ms: float, context_tokens: float) -> int:
        """Return the most sequences of that context that a step decodes within ``itl_ms``."""
        most = self.request_slots or MOST_SEQUENCES
        return next(
            (n for n in range(most) if self.decode_ms(n + 1, (n + 1) * context_tokens) > itl_ms), most
        )

    def timing(self) -> StepTiming:
        """Return it in the form of a profile, in which each prompt of a step costs a fixed time, too."""
        line, step_ms = self.line, self.decode_ms(1, 0.0)

        def prefill_ms(tokens: int) -> float:
            return step_ms + (line.prompt_ms + line.prompt_token_ms * tokens if tokens else 0.0)

        return StepTiming(prefill_ms, self.decode_ms)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back, rounded to six digits."""
        document = asdict(self)
        for name in ("line", "prior"):
            document[name] = [_rounded(value) for value in getattr(self, name).coefficients]
        document["curve"] = [[_rounded(value, 4) for value in point] for point in self.curve]
        for name in ("error", "prior_error", "largest_batch"):
            document[name] = _rounded(document[name])
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> LearntTiming:
        """Read the mapping of ``to_json``; KeyError, TypeError or ValueError for another."""
        known = dict(document)
        line, prior = (StepLine(*map(float, known.pop(name))) for name in ("line", "prior"))
        curve = tuple((float(batch), float(factor)) for batch, factor in known.pop("curve", ()))
        found = cls(line, prior, curve=curve, **known)
        check_types(found)
        numbers = [*line.coefficients, *prior.coefficients, *sum(curve, ()), found.error, found.prior_error]
        numbers += [found.equations, found.steps, found.largest_batch, found.kv_tokens, found.request_slots]
        if not all(math.isfinite(value) and value >= 0 for value in numbers):
            raise ValueError("a learnt timing has a number that is negative or not finite")
        if any(after <= before for (before, _), (after, _) in pairwise(curve)):
            raise ValueError("the batches of a learnt timing's curve do not rise")
        return found


def describe(learnt: LearntTiming) -> str:
    """Say in a line what is known."""
    if not learnt.equations:
        return "nothing learnt yet: no busy second was seen"
    batch = max(1, round(learnt.largest_batch))
    token_ms = learnt.decode_ms(batch, 0.0)
    known = (
        f"learnt from {learnt.steps:,} steps: a prompt token {learnt.line.prompt_token_ms:.2g} ms, "
        f"a token {token_ms:.3g} ms at {batch} running"
    )
    if learnt.equations < MIN_EQUATIONS:
        return f"{known}; error not known before {MIN_EQUATIONS} busy seconds ({learnt.equations} seen)"
    return f"{known}; error {learnt.error:.0%}; not yet seen above {batch} running"


def interpolated(curve: Sequence[tuple[float, float]], batch: float) -> float:
    """Return the curve's factor at a batch, straight between its points; 1 where there is none."""
    if not curve:
        return 1.0
    if batch <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if batch <= right:
            return low + (high - low) * (batch - left) / (right - left)
    return curve[-1][1]


@dataclass
class _KindTimes:
    """Busy time of all equations of one kind, fading: measured, foretold, and foretold by the prior."""

    measured_ms: float = 0.0
    foretold_ms: float = 0.0
    prior_ms: float = 0.0


@dataclass
class _CurveSums:
    """Sums over the spans of one half octave of batches, fading: their number, batches, ms of decoding."""

    spans: float = 0.0
    batches: float = 0.0
    measured_ms: float = 0.0
    foretold_ms: float = 0.0

    @property
    def point(self) -> tuple[float, float]:
        """The mean batch, and the measured over the foretold time, drawn to 1."""
        drawn_ms = CURVE_PRIOR_EQUATIONS * SECOND_MS
        return self.batches / self.spans, (drawn_ms + self.measured_ms) / (drawn_ms + self.foretold_ms)


@dataclass
class StepLearner:
    """The regression of one kind of worker. ``profile`` is the timing that its prior comes from, if any."""

    prior: StepLine
    profile: StepTiming | None = None
    spread: float = SPREAD
    _squares: list[list[float]] = field(default_factory=lambda: [[0.0] * 5 for _ in range(5)])
    _products: list[float] = field(default_factory=lambda: [0.0] * 5)
    _curve_sums: dict[int, _CurveSums] = field(default_factory=dict)
    _times_by_kind: dict[tuple[int, bool], _KindTimes] = field(default_factory=dict)
    _known: LearntTiming | None = None

    @property
    def known(self) -> LearntTiming:
        return self._known or LearntTiming(self.prior, self.prior)

    def begin_with(self, before: LearntTiming) -> None:
        """Go on from an earlier run's result: it is the prior, its error that of ``REMEMBERED_EQUATIONS``."""
        self.prior = StepLine(*(max(value, MIN_SHARE) for value in before.line.coefficients))
        self.spread = MEASURED_SPREAD
        self._known = LearntTiming(
            **{name: getattr(before, name) for name in LearntTiming.__slots__ if name != "prior"},
            prior=before.prior,
        )
        ms = SECOND_MS * REMEMBERED_EQUATIONS
        self._times_by_kind = {
            (-1, False): _KindTimes(ms, ms * (1 + before.error), ms * (1 + before.prior_error))
        }

    def learn(self, counts: StepCounts) -> None:
        """Predict an equation, note the error, and learn it; one without time or steps is ignored."""
        if counts.busy_ms <= 0 or counts.steps <= 0:
            return
        known = self.known
        foretold_ms = foretell_ms(known, counts)
        self._note_error(counts, foretold_ms)
        self._add(counts, foretold_ms if known.equations >= MIN_EQUATIONS else counts.busy_ms)
        line = StepLine(*self._solve())
        self._note_curve(line, counts)
        self._known = LearntTiming(
            line,
            known.prior,
            self._error(lambda kind: kind.foretold_ms),
            self._error(lambda kind: kind.prior_ms),
            known.equations + 1,
            known.steps + round(counts.steps),
            max(known.largest_batch, counts.batch),
            self._curve(),
            known.kv_tokens,
            known.request_slots,
        )

    def _note_error(self, counts: StepCounts, foretold_ms: float) -> None:
        fade = 0.5 ** (1 / ERROR_HALF_LIFE_EQUATIONS)
        for kind in self._times_by_kind.values():
            kind.measured_ms *= fade
            kind.foretold_ms *= fade
            kind.prior_ms *= fade
        is_mostly_prompts = _prompts_ms(self.known.line, counts) > foretold_ms / 2
        kind = self._times_by_kind.setdefault((_half_octave(counts.batch), is_mostly_prompts), _KindTimes())
        kind.measured_ms += counts.busy_ms
        kind.foretold_ms += min(foretold_ms, 2 * counts.busy_ms)
        kind.prior_ms += min(self._prior_ms(counts), 2 * counts.busy_ms)

    def _error(self, foretold_ms: Callable[[_KindTimes], float]) -> float:
        kinds = self._times_by_kind.values()
        missed_ms = sum(abs(foretold_ms(kind) - kind.measured_ms) for kind in kinds)
        return missed_ms / sum(kind.measured_ms for kind in kinds)

    def _prior_ms(self, counts: StepCounts) -> float:
        if self.profile is None:
            return sum(map(_product, self.known.prior.coefficients, counts.features))
        profile, ms = self.profile, 0.0
        if counts.decoded_tokens:
            kv_tokens = counts.kv_token_steps / counts.steps
            ms = counts.steps * profile.decode_ms(counts.batch, kv_tokens)  # type: ignore[arg-type]
        if counts.prompt_tokens:
            begins = max(counts.prompts, 1.0)
            mean = round(counts.prompt_tokens / begins)
            fixed_ms = profile.prefill_ms(0)
            if counts.decoded_tokens:
                fixed_ms = max(0.0, fixed_ms - profile.decode_ms(1, 0.0))
            ms += begins * (fixed_ms + profile.prefill_ms(mean) - profile.prefill_ms(0))
        return ms

    def _add(self, counts: StepCounts, foretold_ms: float) -> None:
        fade = 0.5 ** (1 / HALF_LIFE_EQUATIONS)
        variance = NOISE**2 * foretold_ms * counts.busy_ms
        excess = (counts.busy_ms - foretold_ms) / math.sqrt(variance)
        weight = (min(1.0, HUBER / excess) if excess > HUBER else 1.0) / variance
        features = counts.features
        for row, left in enumerate(features):
            self._products[row] = fade * self._products[row] + weight * left * counts.busy_ms
            squares = self._squares[row]
            for column, right in enumerate(features):
                squares[column] = fade * squares[column] + weight * left * right

    def _solve(self) -> Vector:
        """Return the coefficients, each at least 0."""
        prior = self.prior.coefficients
        held: set[int] = set()
        while True:
            free = [index for index in range(5) if index not in held]
            rows = []
            for index in free:
                strength = 1.0 / max(self.spread * prior[index], MIN_SHARE) ** 2
                row = [self._squares[index][other] + (strength if other == index else 0.0) for other in free]
                rows.append([*row, self._products[index] + strength * prior[index]])
            found = dict(zip(free, solve_linear(rows), strict=True))
            lowest = min(found, key=lambda index: found[index])
            if found[lowest] >= 0 or len(free) == 1:
                a, d1, d2, m, begin = (max(0.0, found.get(index, 0.0)) for index in range(5))
                return a, d1, d2, m, begin
            held.add(lowest)

    def _note_curve(self, line: StepLine, counts: StepCounts) -> None:
        """Note measured over foretold time of decoding, where the span did little else."""
        prompts_ms = _prompts_ms(line, counts)
        decode_ms = sum(map(_product, line.coefficients[:3], counts.features[:3]))
        if counts.batch < 0.5 or prompts_ms > decode_ms or decode_ms <= 0:
            return
        measured_ms = min(2.0 * decode_ms, max(0.5 * decode_ms, counts.busy_ms - prompts_ms))
        fade = 0.5 ** (1 / HALF_LIFE_EQUATIONS)
        sums = self._curve_sums.setdefault(_half_octave(counts.batch), _CurveSums())
        sums.spans = sums.spans * fade + 1.0
        sums.batches = sums.batches * fade + counts.batch
        sums.measured_ms = sums.measured_ms * fade + measured_ms
        sums.foretold_ms = sums.foretold_ms * fade + decode_ms

    def _curve(self) -> tuple[tuple[float, float], ...]:
        return tuple(each.point for _, each in sorted(self._curve_sums.items()))


def foretell_ms(learnt: LearntTiming, counts: StepCounts) -> float:
    """Return the ms that a span with these counts is expected to take."""
    kv_tokens = counts.kv_token_steps / counts.steps if counts.steps else 0.0
    return counts.steps * learnt.decode_ms(counts.batch, kv_tokens) + _prompts_ms(learnt.line, counts)


def _prompts_ms(line: StepLine, counts: StepCounts) -> float:
    return line.prompt_token_ms * counts.prompt_tokens + line.prompt_ms * counts.prompts


def _half_octave(batch: float) -> int:
    return round(2 * math.log2(max(1.0, batch)))


def solve_linear(rows: Sequence[list[float]]) -> list[float]:
    """Solve a positive definite system, each row its coefficients and right side, by Gaussian elimination.

    Rows are scaled first: coefficients of ms per token and of ms per step differ by six orders.
    """
    size = len(rows)
    scale = [1.0 / math.sqrt(rows[index][index]) for index in range(size)]
    table = [
        [
            value * scale[row] * (scale[column] if column < size else 1.0)
            for column, value in enumerate(rows[row])
        ]
        for row in range(size)
    ]
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = table[row][pivot] / table[pivot][pivot]
            for column in range(pivot, size + 1):
                table[row][column] -= factor * table[pivot][column]
    solved = [0.0] * size
    for row in reversed(range(size)):
        rest = sum(table[row][column] * solved[column] for column in range(row + 1, size))
        solved[row] = (table[row][size] - rest) / table[row][row]
    return [value * scale[index] for index, value in enumerate(solved)]


def _product(left: float, right: float) -> float:
    return left * right


def _rounded(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")
