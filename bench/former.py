"""Model of the former default strategy `spread` (0.1), for comparison.

The strategy scored nodes by one sum: one third for the probability that all assigned GPUs are idle,
two thirds for the number of idle GPUs, with the mean load as the fraction between two numbers.
Nodes with enough idle GPUs came first. It refused nodes with foreign use, also on shared GPUs.
Readings are processed as today; the former processing is not modelled.
"""

from typing import Final

import numpy as np

from extender.core.decision.assessment import Assessment, assess
from extender.core.decision.evaluation import Evaluation, EvaluationInputs, estimates
from extender.core.decision.filtering import Code, reject
from extender.core.decision.scoring import _calm, _health, mean
from extender.core.nodes.snapshot import Batch, Flags, Pool, Ratios, Snapshot, batch_rows
from extender.core.policy import Policy, Weights

NAME: Final = "former default"
ENOUGH: Final = 0.4
UNKNOWN: Final = 0.2
CHANCE: Final = 1 / 3
STEPS: Final = 16
BELOW_ONE: Final = 0.999
POLICY: Final = Policy(
    weights=Weights(utilization=0.60, memory=0.15, sharing=0.10, bursts=0.05, stress=0.10)
)


def evaluate(snapshot: Snapshot, pool: Pool, inputs: EvaluationInputs) -> Evaluation:
    """Evaluate every node of a pool as the former default did."""
    batch = batch_rows(pool.rows, snapshot.telemetry, pool.batch.suspicion)
    requested = inputs.devices.columns
    assessment = assess(batch, requested, estimates(inputs.policy))
    # A GPU with foreign use counts as unusable, also if it is shared.
    is_clean = assessment.is_clean & ~batch.telemetry.is_foreign
    idle_chance = np.where(is_clean & assessment.fits, assessment.idle_chance, 0.0)
    codes = reject(
        batch,
        requested,
        assessment,
        requires_idle=np.array([inputs.request.requires_idle]),
        is_wrong_model=np.zeros(len(batch), dtype=np.bool_),
    )
    is_closed = is_clean.sum(axis=1) < assessment.landing.needed
    codes[(codes == Code.PASSES) & is_closed] = Code.FOREIGN_USE
    scores = _scores(batch, assessment, idle_chance, is_clean)
    return Evaluation(
        codes=codes,
        scores=scores * _health(batch, assessment),
        bands=np.zeros(len(batch), dtype=np.int8),
        utilization=mean(assessment.utilization, assessment.works, assessment.working),
    )


def _scores(batch: Batch, assessment: Assessment, chances: Ratios, is_clean: Flags) -> Ratios:
    landing = assessment.landing
    hopes = chances.sum(axis=1)
    share = landing.needed / np.maximum(landing.size, 1)
    steps = np.where(batch.is_shared, hopes * share, np.maximum(hopes - landing.taken, 0.0))
    quiet = _calm(batch, assessment, POLICY.weights) * BELOW_ONE
    place = (np.clip(steps, 0, STEPS) + quiet) / (STEPS + 1)
    order = CHANCE * assessment.chance + (1 - CHANCE) * place
    wanted = np.clip(landing.needed + landing.taken, 1, np.maximum(landing.size, 1))
    falling = np.sort(chances, axis=1)[:, ::-1]
    worst = np.take_along_axis(falling, wanted[:, None] - 1, axis=1)[:, 0]
    idle = (assessment.suits & is_clean).sum(axis=1) - landing.taken
    is_enough = (idle >= landing.needed) & (landing.needed > 0)
    scores: Ratios = np.where(
        is_enough,
        ENOUGH + (1 - ENOUGH) * order,
        UNKNOWN * np.minimum(2 * worst, 1.0) + (ENOUGH - UNKNOWN) * order,
    )
    return scores
