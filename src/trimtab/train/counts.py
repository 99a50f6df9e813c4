"""Exact counts of classes, and the metrics that follow from nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ratio(part: float, whole: float) -> float:
    """`part / whole`, nan where `whole` is 0."""
    return part / whole if whole else math.nan


class ClassCounts:
    """Of each class: how often it was there, predicted, and both."""

    def __init__(self, classes: int) -> None:
        self.right, self.predicted, self.actual = (torch.zeros(classes, dtype=torch.int64) for _ in range(3))

    def add_ids(self, predicted: Tensor, actual: Tensor) -> None:
        """Class ids, [rows] each."""
        classes = len(self.right)
        self.right += torch.bincount(actual[predicted == actual], minlength=classes)
        self.predicted += torch.bincount(predicted, minlength=classes)
        self.actual += torch.bincount(actual, minlength=classes)

    def add_flags(self, predicted: Tensor, actual: Tensor) -> None:
        """[rows, classes] of bool each."""
        self.right += (predicted & actual).sum(0)
        self.predicted += predicted.sum(0)
        self.actual += actual.sum(0)

    def f1(self) -> Tensor:
        """[classes] float64; nan for a class that was neither there nor predicted."""
        return 2 * self.right.double() / (self.predicted + self.actual).double()

    def accuracy(self) -> float:
        return ratio(int(self.right.sum()), int(self.actual.sum()))

    def mcc(self) -> float:
        """Matthews' correlation for any number of classes (Gorodkin 2004), in whole numbers until the root.

        nan with one class in the data; 0 where the data has several and one is predicted throughout.
        """
        right, predicted, actual = int(self.right.sum()), self.predicted.tolist(), self.actual.tolist()
        total = sum(actual)
        spread_actual = total**2 - sum(count**2 for count in actual)
        spread_predicted = total**2 - sum(count**2 for count in predicted)
        if not spread_actual:
            return math.nan
        if not spread_predicted:
            return 0.0
        together = right * total - sum(p * a for p, a in zip(predicted, actual, strict=True))
        return together / (math.sqrt(spread_actual) * math.sqrt(spread_predicted))
