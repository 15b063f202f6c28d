"""Models that the studies train: small networks with compiled steps, and a convolutional one in torch."""
