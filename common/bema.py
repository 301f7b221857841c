"""BEMA, an average of the weights without its lag (Block and Zhang, 2025; Post-Norm, 4.5)."""
import torch


class BEMA:
    """
    EMA_t = (1 - beta_t) EMA_{t-1} + beta_t theta_t, with beta_t = (rho + t)^-kappa, and
    BEMA_t = EMA_t + (rho + t)^-eta (theta_t - theta_0), for evaluation only.
    start is theta_0, ema EMA_t, both {name: weights}: what a checkpoint keeps.
    """
    def __init__(self, model, rho, kappa, eta):
        self.rho, self.kappa, self.eta = rho, kappa, eta
        self.start, self.ema = copy_of(model), copy_of(model)

    def load(self, start, ema):
        """Take over what a checkpoint has kept, wherever it lies."""
        for name in ema:
            self.start[name].copy_(start[name])
            self.ema[name].copy_(ema[name])

    @torch.no_grad()
    def update(self, model, t):
        """After step t = 1, 2, ..."""
        for name, p in model.named_parameters():
            self.ema[name].lerp_(p, (self.rho + t) ** -self.kappa)

    @torch.no_grad()
    def weights(self, model, t):
        """-> {name: BEMA_t}, for load_state_dict(..., strict=False)."""
        alpha = (self.rho + t) ** -self.eta
        return {name: self.ema[name] + alpha * (p - self.start[name])
                for name, p in model.named_parameters()}


def copy_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}
