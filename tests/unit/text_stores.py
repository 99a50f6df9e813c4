"""Random texts as a token store in memory, for tests that need micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.data.task import IGNORED, TaskSpec
from trimtab.job import TaskKind


class RandomTexts:
    """Examples of the given lengths with random tokens (never 0 to 3) and random labels of the kind."""

    def __init__(
        self, kind: TaskKind, lengths: tuple[int, ...], *, vocabulary: int = 97, classes: int = 3, seed: int = 0
    ) -> None:
        self._random = np.random.default_rng(seed)
        self.spec = TaskSpec(kind=kind, text_columns=("text",))
        self.lengths: NDArray[np.int32] = np.array(lengths, dtype=np.int32)
        self.ids = [self._random.integers(4, vocabulary, length).astype(np.int32) for length in lengths]
        self.classes = classes
        self.targets = [self._target(kind, ids) for ids in self.ids]

    def _target(self, kind: TaskKind, ids: NDArray[np.int32]) -> Any:
        if kind == "classification":
            return int(self._random.integers(self.classes))
        if kind == "multilabel_classification":
            return self._random.integers(0, 2, self.classes).astype(np.float32)
        if kind == "regression":
            return float(self._random.normal())
        if kind == "token_classification":
            return np.where(self._random.random(len(ids)) < 0.3, IGNORED, ids % self.classes).astype(np.int32)
        return np.where(np.arange(len(ids)) < len(ids) // 3, IGNORED, ids).astype(np.int32)

    def input_ids(self, index: int) -> NDArray[np.int32]:
        return self.ids[index]

    def token_types(self, index: int) -> NDArray[np.int8] | None:
        return None

    def labels(self, index: int) -> Any:
        return self.targets[index]
