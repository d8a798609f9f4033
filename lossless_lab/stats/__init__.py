"""How sure: intervals and tests about numbers; no idea of models."""
