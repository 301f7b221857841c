"""
Tomita languages 3 and 7: strings of 0 and 1 that a small automaton accepts (Tomita, 1982; Post-Norm, section 6.4).

    3: after an odd number of consecutive 1s never an odd number of consecutive 0s       7: 0*1*0*1*

A walk repeats its symbol, or switches to the other with probability p_switch where both are legal; in an accepting state it may end
with probability p_end, so that about half of the strings end by 100. As in the paper's long validation, the walk goes on where
it would end, and the target keeps the true distribution, the end included.
"""
from dataclasses import dataclass

import numpy as np
import torch

from data import tvd

BOS, EOS, ZERO = 0, 1, 2  # the symbols are tokens 2 and 3
# state -> after 0, after 1 (-1 is illegal), whether it accepts; the walk starts in state 0
AUTOMATA = {3: [(0, 1, True), (2, 0, True), (3, -1, False), (2, 1, True)],  # A, O: odd 1s, Z1 and Z0: odd and even 0s after them
            7: [(0, 1, True), (2, 1, True), (2, 3, True), (-1, 3, True)]}


@dataclass
class Task:
    data: str = "tomita"  # a synthetic task (flipflop selective_copy counting set_complement dyck tomita), or text
    block_size: int = 100     # tokens in a training input, <s> included
    language: int = 3         # 3 or 7
    p_switch: float = 0.0     # 0 is the paper's balance: 0.2 for language 3, 0.01 for 7
    p_end: float = 0.0        # 0 likewise: 0.0086 and 0.00684

    splits = ("train", "iid", "long")
    # paper: Post-Norm, section 6.4; its search draws the other hyper-parameters at random
    defaults = {
        "nano": dict(n_layer=2, n_head=4, n_embd=64, block_size=100, batch_size=64, max_iters=2000, learning_rate=1e-3, min_lr=0.0,
                     lr_decay="linear", warmup_iters=100, eval_interval=500, eval_iters=10),
        "paper": dict(n_layer=2, n_head=4, n_embd=64, block_size=100, batch_size=64, max_iters=100000, learning_rate=1e-3, min_lr=0.0,
                      lr_decay="linear", warmup_iters=1000, eval_interval=5000, eval_iters=10),
    }

    def __post_init__(self):
        self.vocab_size = 4
        if self.language not in AUTOMATA:
            raise ValueError(f"language={self.language}: choose from {', '.join(map(str, AUTOMATA))}")
        self.switch = self.p_switch or {3: 0.2, 7: 0.01}[self.language]
        self.end = self.p_end or {3: 0.0086, 7: 0.00684}[self.language]
        if not (0 < self.switch < 1 and 0 < self.end < 1 and self.block_size >= 1):
            raise ValueError("tomita needs p_switch and p_end between 0 and 1, and block_size of at least 1")
        to, accepts = [a[:2] for a in AUTOMATA[self.language]], [a[2] for a in AUTOMATA[self.language]]
        self.to, self.accepts = np.array(to), np.array(accepts)

    def batch(self, split, batch_size, rng):
        """-> x, y (batch_size, T) int64: a walk from <s>, and after each token a sample of what may follow. long is 460 tokens or more."""
        T, B = max(460, self.block_size) if split == "long" else self.block_size, batch_size
        x, y, state = np.full((B, T + 1), BOS), np.empty((B, T), np.int64), np.zeros(B, np.int64)
        u, end = rng.random((T, B)), rng.random((T, B)) < self.end
        symbol = rng.integers(0, 2, B)
        for t in range(T):
            symbol = np.where(u[t] < (self.switch if t else 0), 1 - symbol, symbol)
            symbol = np.where(self.to[state, symbol] < 0, 1 - symbol, symbol)  # one is always legal
            x[:, t + 1] = ZERO + symbol
            y[:, t] = np.where(self.accepts[state] & end[t], EOS, x[:, t + 1])
            state = self.to[state, symbol]
        return x[:, :-1], y

    def states(self, x):
        """x (B, T) -> the automaton's state after each token, (B, T)."""
        to, state, found = torch.from_numpy(self.to).to(x.device), torch.zeros_like(x[:, 0]), []
        for t in range(x.size(1)):
            state = torch.where(x[:, t] >= ZERO, to[state, (x[:, t] - ZERO).clamp(min=0)], state)
            found.append(state)
        return torch.stack(found, 1)

    def target(self, x):
        """x (B, T) -> the next token's distribution after each prefix, (B, T, 4) float32."""
        state = self.states(x)
        legal = torch.from_numpy(self.to >= 0).to(x.device)[state]                  # (B, T, 2)
        last = (x - ZERO)[..., None] == torch.arange(2, device=x.device)
        p = torch.where(last, 1 - self.switch, self.switch)
        p = torch.where((x < ZERO)[..., None], 0.5, p) * legal
        p = p / p.sum(-1, keepdim=True)
        end = self.end * torch.from_numpy(self.accepts).to(x.device)[state][..., None]
        return torch.cat((torch.zeros_like(end), end, p * (1 - end)), -1)

    def score(self, logits, x, y):
        """logits (B, T, 4) -> {metric: (count, out of) per string}: total variation distance, mean over the prefixes."""
        distance = tvd(logits, self.target(x))
        return dict(tvd=(distance.sum(1), torch.ones_like(distance).sum(1)))

    def contrast(self, logits, x):
        """For the ROC AUC by position: the logit (B, T) of the symbol that may be illegal (3: 1, 7: 0), and whether it is legal."""
        symbol = {3: 1, 7: 0}[self.language]
        return logits[..., ZERO + symbol], torch.from_numpy(self.to[:, symbol] >= 0).to(x.device)[self.states(x)]

    def show(self, x):
        """One string's tokens as labels, for figures."""
        return [["<s>", "</s>", "0", "1"][t] for t in x]
