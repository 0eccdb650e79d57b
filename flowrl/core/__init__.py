"""Modality-free parts of a run. Imports torch, accelerate and Pillow only; knows no method, model or reward by name."""
