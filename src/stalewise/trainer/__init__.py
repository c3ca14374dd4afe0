"""From rollouts in the store to the next policy. Never imports the sampler."""
