"""The training program: a TOML file in, a trained model and its metrics out."""
