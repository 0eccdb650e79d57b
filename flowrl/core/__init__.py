"""Modality-free parts of a run. Imports torch only; knows no method, model or reward by name."""
