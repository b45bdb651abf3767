"""The plan of a step: who holds which slice, who orthogonalizes which matrix, what moves. Pure: it holds no tensors."""
