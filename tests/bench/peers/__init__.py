"""Other libraries doing what Raysume does, for the benches alone: each the way its own documentation shows it."""
