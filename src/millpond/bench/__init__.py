"""The benchmark: workloads, periods with and without a cache, statistics, records."""
