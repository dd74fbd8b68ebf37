"""The reference executor on the real models, against stored logits of transformers. Skipped where a model is absent."""

from __future__ import annotations

import numpy as np
import pytest

from parity.cases import REAL_BEST, REAL_CONFIGS, REAL_ROWS, TOLERANCE, real_golden
from parity.real import LazyWeights, load_real
from tricorn.models import build_graph, check_weights
from tricorn.runtime.reference import ReferenceExecutor


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_real_logits_equal_those_of_transformers(name: str) -> None:
    try:
        checkpoint, ids = load_real(name)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    golden = np.load(real_golden(name))
    assert ids == golden["ids"].tolist(), "the tokenizer gives other ids than the golden's"
    graph = build_graph(checkpoint.config)
    check_weights(graph, checkpoint.tensors)
    logits = ReferenceExecutor(graph, LazyWeights(checkpoint.tensors), pages=0).forward(ids)[list(REAL_ROWS)]
    best = np.take_along_axis(logits, golden["best"], axis=-1)
    assert np.all(np.abs(best - golden["logits"]).max(axis=-1) <= TOLERANCE * golden["largest"])
    ours = np.sort(logits, axis=-1)[:, ::-1][:, :REAL_BEST]
    assert np.all(np.abs(ours - golden["logits"]).max(axis=-1) <= TOLERANCE * golden["largest"])
