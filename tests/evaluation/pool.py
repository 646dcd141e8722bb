"""An engine by hand, for tests of what is counted and timed."""

import types

from hla_jax.evaluation import served

PAGE = 16


class Pool(served.Server):
    """vLLM's scheduling in short: running sequences grow, the newest is preempted, then one prompt comes."""

    def __init__(self, pages: int, limit: int = 1000):
        self.pages, self.limit = pages, limit
        self.scheduler = types.SimpleNamespace(max_num_running_reqs=limit, running=[])
        self.waiting, self.preempted, self.equal = [], {}, True

    @property
    def free(self):
        return self.pages - sum(-(-tokens // PAGE) for tokens, _ in self.scheduler.running)

    def submit(self, prompt, new):
        self.waiting.append((prompt, new))

    def step(self):
        running = self.scheduler.running
        running[:] = [(tokens + 1, left - 1) for tokens, left in running]
        while self.free < 0:
            tokens, left = running.pop()
            self.waiting.insert(0, (tokens, left))
            self.preempted[str(len(self.preempted))] = 1
        # The token that a prompt gives is its first new one.
        if self.waiting and -(-self.waiting[0][0] // PAGE) <= self.free and len(running) < self.limit:
            tokens, left = self.waiting.pop(0)
            running.append((tokens, left - 1))
        self.equal &= len({tokens for tokens, _ in running}) <= 1
        over = sum(left <= 0 for _, left in running)
        running[:] = [(tokens, left) for tokens, left in running if left > 0]
        return over

    def clear(self):
        self.scheduler.running.clear()
        self.waiting.clear()
        self.preempted.clear()
