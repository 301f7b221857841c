"""BEMA, an average of the weights without its lag (Block and Zhang, 2025; Post-Norm, 4.5)."""
import torch


class BEMA:
    """
    EMA_t = (1 - beta_t) EMA_{t-1} + beta_t theta_t, with beta_t = (rho + t)^-kappa, and
    BEMA_t = EMA_t + (rho + t)^-eta (theta_t - theta_0), for evaluation only.
    """
    def __init__(self, model, rho, kappa, eta):
        self.rho, self.kappa, self.eta = rho, kappa, eta
        self.start, self.ema = copy_of(model), copy_of(model)

    @torch.no_grad()
    def update(self, model, t):
        """After step t = 1, 2, ..."""
        for name, p in model.named_parameters():
            self.ema[name].lerp_(p, (self.rho + t) ** -self.kappa)

    def weights(self, model, t):
        """-> {name: BEMA_t}, for load_state_dict(..., strict=False)."""
        alpha = (self.rho + t) ** -self.eta
        theta = dict(model.named_parameters())
        return {name: ema + alpha * (theta[name].detach() - self.start[name])
                for name, ema in self.ema.items()}

    def state_dict(self):
        return dict(start=self.start, ema=self.ema)

    def load_state_dict(self, state):
        """Raises KeyError or RuntimeError where the weights are another model's."""
        for average, saved in ((self.start, state["start"]), (self.ema, state["ema"])):
            for name, p in average.items():
                p.copy_(saved[name])


def copy_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}
