"""Load tests of servers that speak OpenAI's protocol: arrivals, latencies, throughput, goodput."""
