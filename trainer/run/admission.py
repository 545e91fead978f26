"""How many slots of the buffer may be in use: as few as keep the learner from waiting, so that rollouts are fresh.

Why. A prompt is trained on after all that was admitted before it. With N slots in use and P prompts a step that is N / P - 1
versions after its admission, whether its rollouts took long or not: where sampling is faster than training, a full buffer
(N = (s + 1) P - w, see `trainer.run.buffer`) makes every rollout as stale as the bound allows, and most of that time it waits
finished. Slots become free when new weights are served, so a smaller N admits the same prompts later, under newer weights.

How small. N = 2 P is the least with which sampling and training overlap: one batch is trained on while the next is sampled, one
version of staleness. Less would make the learner wait in every step. More is needed when a batch's longest rollout takes longer
than a step of training, or when the engines need more in flight to be fast; how much more depends on lengths, engines and
window, so it is not predicted but found from what it costs: seconds W that the learner waited for a batch, T that it worked
since the batch before.

The rule. After each batch, N grows by P (W / T - c), within [2 P, capacity].
 - W seconds too late means that W seconds' worth of the learner's prompts, P W / T, were admitted too few.
 - N comes to rest where W / T is c on average: freshness costs the share c of the learner's time, and no more. A wait that is
   rare enough is taken, a frequent one is not. One wait counts as a step of training at most, so that a worker's restart does
   not fill the buffer.
 - Where rollouts are the bottleneck the learner waits again and again, so N grows to the capacity within a few steps: the speed
   of a full buffer, and its staleness. N may be up to P above the capacity, which allows nothing more but remembers waits for
   1 / c steps; otherwise each wait at the capacity would be forgotten, and N would fall and cost the next one.
 - When for `STREAK` batches in a row another whole batch was ready behind the one that was taken, P prompts fewer are tried.

Limits. N never exceeds the capacity, so the bound on staleness holds as it is proved; N >= P, so a whole batch can always be
admitted and `Buffer.take` ends. With ``max_staleness`` 0 or 1 the capacity is at most 2 P, and the rule changes nothing. Order
is that of admission, whatever N is: lengths decide nothing. Nothing of this is in a checkpoint: a resumed run measures again.

Example:
    >>> admission = Admission(prompts_per_step=10, capacity=50)
    >>> admission.limit, admission.took(0.0, 90.0, ready=0)  # nobody knows yet how long a step of training takes
    (20, 20)
    >>> admission.took(190.0, 240.0, ready=4)  # 50 s of waiting after 100 s of work
    24
"""

from __future__ import annotations


class Admission:
    """See the module's docstring; pure, and times are in seconds of any clock.

    Args:
        prompts_per_step: P.
        capacity: of the buffer, slots.
        full: always allow all of it.
    """

    PRICE = 0.01
    """c, the share of the learner's time that freshness may cost."""
    STREAK = 20
    """Batches in a row that had another whole one ready behind them before fewer prompts are tried."""

    def __init__(self, prompts_per_step: int, capacity: int, full: bool = False) -> None:
        self.prompts_per_step, self.capacity = prompts_per_step, capacity
        self._least = capacity if full else min(2 * prompts_per_step, capacity)
        self._slots = float(self._least)
        """N; above the capacity it is only remembered."""
        self._took: float | None = None
        """When the batch before was taken."""
        self._ahead = 0
        """Batches in a row with another whole one behind them."""

    @property
    def limit(self) -> int:
        """Slots that may be in use now."""
        return min(int(self._slots), self.capacity)

    def took(self, asked: float, now: float, ready: int) -> int:
        """The learner took a batch; returns the new `limit`.

        Args:
            asked: when it asked for the batch.
            now: when it got it.
            ready: slots that could be trained on when it asked.
        """
        before, self._took = self._took, now
        if before is None or asked <= before or self._least == self.capacity:
            return self.limit
        prompts = self.prompts_per_step
        late = min((now - asked) / (asked - before), 1.0)
        self._slots = min(self._slots + prompts * (late - self.PRICE), self.capacity + prompts)
        self._ahead = self._ahead + 1 if ready >= 2 * prompts else 0
        if self._ahead == self.STREAK:
            self._ahead, self._slots = 0, self.limit - float(prompts)
        self._slots = max(self._slots, self._least)
        return self.limit
