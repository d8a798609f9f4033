"""Level 2, the same sampling distribution: distances between laws, and tests about samples."""
