"""Real architectures with random weights, beside what a user has without wavecrest."""
