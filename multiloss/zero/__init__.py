"""ZeRO optimizers whose gradients follow autograd instead of the engine's forward."""
