"""The plan of a step: who holds which slice, who orthogonalizes which matrix, what travels. Pure: no tensors."""
