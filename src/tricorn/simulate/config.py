"""What a simulation is like: drawn from a seed, every kind of engine under every kind of load."""

from __future__ import annotations

from random import Random
from typing import get_args

import msgspec

from tricorn.scheduler.cost import Cost, Work
from tricorn.scheduler.limits import Limits
from tricorn.scheduler.options import Admission, PolicyName, SchedulerOptions
from tricorn.simulate.executor import VOCAB

EOS = (0,)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, and the world around it. Shares and rates are probabilities: of a request, or of a step."""

    seed: int
    options: SchedulerOptions
    overlap: bool
    pages: int
    limits: Limits
    cost: Cost
    max_waiting: int
    max_wait: float
    """Seconds; 0 is no bound."""
    load: float
    """Offered work over what the engine can do, roughly."""
    burst: int
    """Requests that come together."""
    longest_prompt: int
    longest_output: int
    tenants: int
    greedy: float
    """The share of requests that the first tenant sends beside its own part."""
    salts: int
    stems: int
    """Beginnings that prompts share."""
    priorities: int
    """Priorities go from minus this to this."""
    plain: bool
    """No request is aborted, late or failed: what is promised of fairness can be told."""
    abort_share: float
    deadline_share: float
    longest_deadline: float
    failure_rate: float
    death_rate: float
    poison_share: float
    """Of requests that kill the engine before they bring a token."""
    disk_pages: int
    """What the tier below memory holds; 0: there is none."""
    disk_read_seconds: float
    disk_fault_rate: float
    """Of each read and write."""


def draw(seed: int) -> Config:
    """The configuration of a seed. A context fits the pool; a step has a row for every running sequence."""
    random = Random(f"configuration {seed}")
    pages = random.choice([8, 16, 24, 32, 48, 64, 96, 128, 256])
    context = min(pages * 16, random.choice([64, 128, 256, 512, 1024]))
    sequences = random.choice([1, 2, 3, 4, 8, 8, 16, 32])
    tokens = max(sequences + random.choice([0, 1, 15, 32]), random.choice([16, 32, 64, 64, 128, 256]))
    step = random.choice([0.002, 0.01, 0.03])
    token = step * random.choice([0.001, 0.01, 0.1])
    cost = Cost(step, token, token / 1000, step * 0.01, step * 1e-5)
    policy = random.choice(get_args(PolicyName))
    plain = random.random() < (0.5 if policy == "fair" else 0.2)
    return Config(
        seed=seed,
        options=SchedulerOptions(
            policy=policy,
            admission=random.choice(get_args(Admission)),
            target_itl=random.choice([0.0, step * 1.2, step * 2, step * 10]),
        ),
        overlap=random.random() < 0.8,
        pages=pages,
        limits=Limits(
            context=context,
            vocab=VOCAB,
            max_sequences=sequences,
            max_tokens=tokens,
            max_rows=sequences + random.choice([0, 0, 4, 64]),
            eos_ids=EOS,
        ),
        cost=cost,
        max_waiting=random.choice([1, 4, 16, 64]),
        max_wait=random.choice([0.0, 0.0, 1.0, 30.0]),
        load=random.choice([0.3, 0.8, 1.5, 3.0]),
        burst=random.choice([1, 1, 4, 16]),
        longest_prompt=min(context - 1, random.choice([16, 64, 200, 1000])),
        longest_output=random.choice([4, 16, 64, 200]),
        tenants=random.choice([1, 2, 3, 4]),
        greedy=random.choice([0.0, 0.5, 0.8]),
        salts=random.choice([1, 1, 2]),
        stems=random.choice([1, 4, 16]),
        priorities=random.choice([0, 1, 5]),
        plain=plain,
        abort_share=0.0 if plain else random.choice([0.0, 0.05, 0.3]),
        deadline_share=0.0 if plain else random.choice([0.0, 0.1, 0.5]),
        longest_deadline=step * random.choice([20, 200, 2000]),
        failure_rate=0.0 if plain else random.choice([0.0, 0.0, 0.003]),
        death_rate=0.0 if plain else random.choice([0.0, 0.0, 0.002]),
        poison_share=0.0 if plain else random.choice([0.0, 0.0, 0.0, 0.01]),
        disk_pages=random.choice([0, 0, 32, 256]),
        disk_read_seconds=random.choice([0.0, token * 4, token * 40]),
        disk_fault_rate=random.choice([0.0, 0.02, 0.2]),
    )


def request_seconds(config: Config) -> float:
    """What a middling request takes of the engine's time when it shares its steps, roughly."""
    prompt, output, limits = config.longest_prompt / 2, config.longest_output / 2, config.limits
    together = min(limits.max_running, config.pages * 16 / (prompt + output))
    alone = config.cost.seconds(Work(decode_rows=1)) - config.cost.decode_row
    prefill = prompt * config.cost.prefill_token + prompt / limits.max_tokens * alone / together
    return prefill + output * (alone / max(together, 1.0) + config.cost.decode_row)
