"""The state and resource contract: effects, ledger, scale timeline, leases, weight versions, stream clock, errors."""
