"""All Triton code: the kernels themselves, what every launch needs, and where they can run."""
