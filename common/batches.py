"""The batches of a training, drawn ahead."""
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def batches(task, c, start, device, rank=0, world=1):
    """
    For every step from `start` on its micro-batches [(x, y), ...], of each this process' share. A
    thread draws the next step's while one is computed; they follow from (seed, step) alone.
    """
    def draw(it):
        rng, drawn = np.random.default_rng([c.seed, it]), []
        for _ in range(c.gradient_accumulation_steps):
            both = task.tensors(task.splits[0], c.batch_size, rng)
            both = [part[rank::world] for part in both]
            if device.type == "cuda":  # pinned memory is copied while the GPU computes
                both = [part.pin_memory() for part in both]
            drawn.append(both)
        return drawn

    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(draw, start)
        for it in range(start, c.max_iters):
            drawn = coming.result()
            coming = thread.submit(draw, it + 1)
            yield drawn
