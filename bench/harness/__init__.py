"""What benchmarks share: results on disk, statistics, figures and the suites."""
