"""Expert-choice routing: experts choose tokens, for equal load (arXiv 2202.09368, section 3.2)."""

from fractions import Fraction

import torch
from torch import Tensor

from moe.routing.balance import entropy, z_loss
from moe.routing.choices import ChoicesByExpert
from moe.routing.router import Router, RoutingState, TokenContext
from moe.routing.routing import Routing
from moe.routing.selection import ranks_up_to_rounding
from moe.spec.routers import ExpertChoiceSpec


class ExpertChoice(Router[ExpertChoiceSpec]):
    """Router by expert choice: in each group, every expert takes the C tokens with the highest probability for it; a
    token may have any number of experts. C depends on real tokens only, so padding changes nothing. Training and
    evaluation route in the same way."""

    def __call__(self, logits: Tensor, tokens: TokenContext, layer: int, state: RoutingState) -> Routing:
        num_groups, group_tokens, num_experts = logits.shape
        probs_GSE = logits.softmax(dim=-1)
        real_GS = tokens.real(logits)
        capacity = self.spec.capacity(group_tokens, num_experts)
        share = Fraction(str(self.spec.factor)) / num_experts
        takes_G = -(-real_GS.sum(1) * share.numerator // share.denominator)  # rounded up

        wanted_GES = probs_GSE.masked_fill(~real_GS[..., None], -1.0).transpose(1, 2)
        places_GES = ranks_up_to_rounding(wanted_GES.clamp(min=0), logits, real_GS)
        places_GES = places_GES.masked_fill(~real_GS[:, None], group_tokens)
        best = places_GES.argsort(dim=-1, stable=True)[..., :capacity]
        weight_EGC = wanted_GES.gather(-1, best).transpose(0, 1)
        first_of_group = torch.arange(num_groups, device=logits.device)[:, None] * group_tokens
        token_EGC = best.transpose(0, 1) + first_of_group
        taken_GC = torch.arange(capacity, device=logits.device) < takes_G[:, None]
        kept_EGC = taken_GC & (weight_EGC >= 0)
        choices = ChoicesByExpert(token_EGC, weight_EGC, kept_EGC, num_groups * group_tokens)
        return Routing(
            choices,
            expert=None,
            weight=None,
            kept=None,
            known_position=None,
            num_groups=num_groups,
            capacity=capacity,
            chosen=choices.load,
            aux_loss=logits.new_zeros(()),
            aux_units=logits.new_full((), num_groups),
            z_loss=z_loss(logits, real_GS),
            entropy=entropy(probs_GSE.detach(), real_GS),
            rejected=logits.new_zeros(()),
            dropped=logits.new_zeros(()),
            num_choices=choices.load.sum(),
            num_tokens=real_GS.sum(),
        )
