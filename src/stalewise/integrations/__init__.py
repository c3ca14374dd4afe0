"""Our objectives, diagnostics and rollout store inside other people's trainers. Nothing else imports this room."""
