"""From a checkpoint and a task to rollouts in the store. Never imports the learner."""
