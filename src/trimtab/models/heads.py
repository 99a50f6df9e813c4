"""Which head a task needs, and which tasks a model can do. Loads no torch."""

from __future__ import annotations

from trimtab.data.task import LANGUAGE_KINDS, TaskSpec
from trimtab.errors import ModelError
from trimtab.job import TaskKind
from trimtab.models.facts import ModelFacts


def auto_class_name(kind: TaskKind) -> str:
    """The class of transformers that builds the model for a task."""
    if kind in LANGUAGE_KINDS:
        return "AutoModelForCausalLM"
    return "AutoModelForTokenClassification" if kind == "token_classification" else "AutoModelForSequenceClassification"


def check_task(facts: ModelFacts, spec: TaskSpec) -> None:
    """Raises ModelError when the model cannot do the task; says what it can do."""
    if facts.is_encoder_decoder:
        raise ModelError(
            f"{facts.path} is an encoder-decoder ({facts.model_type}), which cannot be trained here yet.",
            cure="Take an encoder (BERT, RoBERTa, DeBERTa ...) for classes and values, or a decoder (Llama, Qwen ...)"
            " for text.",
        )
    if spec.kind in LANGUAGE_KINDS and not facts.can_generate:
        raise ModelError(
            f"{facts.path} is an encoder ({facts.model_type}) and cannot write text, which"
            f" {spec.kind.replace('_', ' ')} needs.",
            cure="Take a decoder (Llama, Qwen ...), or `task.kind`: classification, regression, token_classification.",
        )
