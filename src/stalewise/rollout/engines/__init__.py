"""Engines that sample: embedded, vLLM, OpenAI-compatible servers."""
