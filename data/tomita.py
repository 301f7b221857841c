"""
Tomita languages 3 and 7: strings of 0 and 1 that a small automaton accepts (Tomita, 1982;
Post-Norm, section 6.4).

    3: after an odd number of consecutive 1s never an odd number of consecutive 0s
    7: 0*1*0*1*

A walk repeats its symbol, or switches to the other with probability P_SWITCH where both are legal;
in an accepting state it may end with probability P_END, so that about half of the strings end by
100. So that they get long, the walk goes on where it would end, and the target keeps the true
distribution, the end included.
"""
import numpy as np
import torch

import data

BOS, EOS, ZERO = 0, 1, 2  # the symbols 0 and 1 are tokens 2 and 3

# (the state after a 0, after a 1; whether it accepts); -1 is illegal
AUTOMATA = {
    3: [(0, 1, True),    # an even number of 1s
        (2, 0, True),    # an odd number of 1s
        (3, -1, False),  # an odd number of 0s after an odd number of 1s
        (2, 1, True)],   # an even number of 0s after an odd number of 1s
    7: [(0, 1, True),    # 0*
        (2, 1, True),    # 0*1*
        (2, 3, True),    # 0*1*0*
        (-1, 3, True)],  # 0*1*0*1*
}
P_SWITCH = {3: 0.2, 7: 0.01}     # ours
P_END = {3: 0.0086, 7: 0.00684}  # half of the strings end by 100, as in the paper
MAY_BE_ILLEGAL = {3: 1, 7: 0}  # this symbol
LONG = 460  # tokens in long, at least


class Task(data.Task):
    block_size: int = 100  # tokens in a training input, <s> included
    language: int = 3      # 3 or 7

    vocab_size = 4
    splits = ("train", "iid", "long")
    # paper: Post-Norm, section 6.4, whose search draws the rest at random
    nano = dict(
        n_layer=2, n_head=4, n_embd=64, block_size=100, batch_size=64, max_iters=2000,
        learning_rate=1e-3, min_lr=0.0, lr_decay="linear", warmup_iters=100,
        eval_interval=500, eval_iters=10)
    paper = nano | dict(max_iters=100000, warmup_iters=1000, eval_interval=5000)
    defaults = dict(nano=nano, paper=paper)

    def __post_init__(self):
        if self.language not in AUTOMATA:
            raise ValueError(f"language={self.language}: choose from 3 and 7")
        self.switch, self.end = P_SWITCH[self.language], P_END[self.language]
        after_0, after_1, accepts = zip(*AUTOMATA[self.language])
        self.to = np.stack((after_0, after_1), 1)  # (state, symbol) -> state
        self.accepts = np.array(accepts)

    def batch(self, split, batch_size, rng):
        """-> x, y (B, T): a walk from <s>; y is a sample of what may follow."""
        B, T = batch_size, self.block_size
        if split == "long":
            T = max(LONG, self.block_size)
        switch = rng.random((T, B)) < self.switch
        end = rng.random((T, B)) < self.end
        symbol = rng.integers(0, 2, B)
        switch[0] = False  # the first symbol is drawn

        x = np.full((B, T + 1), BOS)
        y = np.empty((B, T), np.int64)
        state = np.zeros(B, np.int64)
        for t in range(T):
            symbol = np.where(switch[t], 1 - symbol, symbol)
            illegal = self.to[state, symbol] < 0
            symbol = np.where(illegal, 1 - symbol, symbol)  # one of the two is always legal
            x[:, t + 1] = ZERO + symbol
            y[:, t] = np.where(self.accepts[state] & end[t], EOS, x[:, t + 1])
            state = self.to[state, symbol]
        return x[:, :-1], y

    def states(self, x):
        """x (B, T) -> the automaton's state after each token, (B, T)."""
        to = torch.from_numpy(self.to).to(x.device)
        state = torch.zeros_like(x[:, 0])
        states = []
        for token in x.T:
            symbol = (token - ZERO).clamp(min=0)
            state = torch.where(token >= ZERO, to[state, symbol], state)
            states.append(state)
        return torch.stack(states, 1)

    def target(self, x):
        """x (B, T) -> the next token's distribution, (B, T, 4) float32."""
        state = self.states(x)
        legal = torch.from_numpy(self.to >= 0).to(x.device)[state]                  # (B, T, 2)
        accepts = torch.from_numpy(self.accepts).to(x.device)[state][..., None]     # (B, T, 1)
        last = (x - ZERO)[..., None] == torch.arange(2, device=x.device)            # (B, T, 2)
        p = torch.where(last, 1 - self.switch, self.switch)
        p = torch.where((x < ZERO)[..., None], 0.5, p) * legal
        p = p / p.sum(-1, keepdim=True)
        end = self.end * accepts
        return torch.cat((torch.zeros_like(end), end, p * (1 - end)), -1)

    def contrast(self, logits, x):
        """The logit of the symbol that may be illegal, and whether it is legal."""
        symbol = MAY_BE_ILLEGAL[self.language]
        legal = torch.from_numpy(self.to[:, symbol] >= 0).to(x.device)
        return logits[..., ZERO + symbol], legal[self.states(x)]

    def show(self, x):
        return [["<s>", "</s>", "0", "1"][t] for t in x]
