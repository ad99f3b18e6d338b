"""The pace of answers that come whole: how far one probably is by now, which nobody tells.

Of a whole answer only its end is seen: the seconds t after which it came, its tokens n, and the blocks p of
its prompt that the worker had to compute. Over recent answers the two costs of

    t = a p + b n        a: seconds per block of a prompt,  b: seconds per token of an answer

are the least squares' (normal equations), older answers fading. Waiting is in both, as it is for the next
one. Where that has no solution with a and b above 0 (one answer, or all alike), all of the time is taken for
decoding: a = 0, b = sum of t n / sum of n n. An answer is not taken to be longer than they are on average.
"""

from __future__ import annotations

FADE = 0.98
"""Weight of the answers before, for each new one: those of the last 50 count."""

NEARLY_ALIKE = 1e-6
"""Share of the product of the squares below which the determinant is taken for 0."""


class AnswerPace:
    """Learns from whole answers, and estimates the others."""

    def __init__(self) -> None:
        self._answers = self._tokens = 0.0
        self._pp = self._pn = self._nn = self._pt = self._nt = 0.0

    def ended(self, blocks: int, tokens: int, seconds: float) -> None:
        """Note an answer of that many tokens, before which those blocks were computed."""
        if tokens > 0:
            self._answers = FADE * self._answers + 1
            self._tokens = FADE * self._tokens + tokens
            self._pp = FADE * self._pp + blocks * blocks
            self._pn = FADE * self._pn + blocks * tokens
            self._nn = FADE * self._nn + tokens * tokens
            self._pt = FADE * self._pt + blocks * seconds
            self._nt = FADE * self._nt + tokens * seconds

    def tokens_after(self, blocks: int, seconds: float) -> int:
        """Return the tokens that an answer with that many blocks to compute probably has; 0 if not known."""
        if not self._answers:
            return 0
        per_block_s, per_token_s = self._costs()
        if per_token_s <= 0:
            return 0
        longest = self._tokens / self._answers
        return int(min(max(0.0, seconds - per_block_s * blocks) / per_token_s, longest))

    def _costs(self) -> tuple[float, float]:
        determinant = self._pp * self._nn - self._pn * self._pn
        if determinant > NEARLY_ALIKE * self._pp * self._nn:
            per_block_s = (self._pt * self._nn - self._nt * self._pn) / determinant
            per_token_s = (self._nt * self._pp - self._pt * self._pn) / determinant
            if per_block_s > 0 and per_token_s > 0:
                return per_block_s, per_token_s
        return 0.0, self._nt / self._nn
