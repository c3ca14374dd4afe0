"""Rollouts on disk: Parquet shards, manifests written last, and the ledger of consumed rollouts. Imports no torch."""

from stalewise.store.columns import RolloutColumns, TokenColumn, concatenate
from stalewise.store.ledger import (
    LedgerEntry,
    Ranges,
    append_entry,
    consumed,
    from_ranges,
    ledger_path,
    read_ledger,
    to_ranges,
    truncate_ledger,
)
from stalewise.store.manifest import (
    BatchManifest,
    BatchName,
    ShardManifest,
    batch_directories,
    batch_directory,
    committed_shards,
    is_committed,
    parse_batch_name,
    read_batch_manifest,
    shard_path,
)
from stalewise.store.reader import (
    Batch,
    Selection,
    mean_reward,
    open_batch,
    open_shards,
    rewards_of_updates,
    rollouts_of_updates,
    split_into_updates,
    verify_shard,
)
from stalewise.store.schema import (
    EPISODE_SCHEMA,
    EPISODES,
    FORMAT,
    SCHEMA,
    rollouts_from_table,
    table_from_columns,
    table_from_rollouts,
)
from stalewise.store.token_log import TokenLog, TokenRecord, read_tokens, token_files, token_log_directory
from stalewise.store.writer import AlreadyCommitted, commit_batch, complete_manifests, next_shard, write_shard

__all__ = ["RolloutColumns", "TokenColumn", "concatenate"]
__all__ += ["LedgerEntry", "Ranges", "append_entry", "consumed", "from_ranges", "ledger_path"]
__all__ += ["read_ledger", "to_ranges", "truncate_ledger"]
__all__ += ["BatchManifest", "BatchName", "ShardManifest", "batch_directories", "batch_directory", "committed_shards"]
__all__ += ["is_committed", "parse_batch_name", "read_batch_manifest", "shard_path"]
__all__ += ["Batch", "Selection", "open_batch", "open_shards", "verify_shard"]
__all__ += ["EPISODES", "EPISODE_SCHEMA", "FORMAT", "SCHEMA"]
__all__ += ["rollouts_from_table", "table_from_columns", "table_from_rollouts"]
__all__ += ["mean_reward", "rewards_of_updates", "rollouts_of_updates", "split_into_updates"]
__all__ += ["TokenLog", "TokenRecord", "read_tokens", "token_files", "token_log_directory"]
__all__ += ["AlreadyCommitted", "commit_batch", "complete_manifests", "next_shard", "write_shard"]
