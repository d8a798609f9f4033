"""Level 3, the same usefulness: text similarity (supporting evidence only) and task metrics."""
