"""The contract between graph and runtime, and what builds engines from it."""
