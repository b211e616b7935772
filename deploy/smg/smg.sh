#!/bin/sh
# Starts SMG in front of replicas of inferno: pip install smg==1.13.0
#
#   smg.sh http://a:8000 http://b:8000       the replicas
#   SMG_WORKERS=workers.json smg.sh          the replicas in a file, which SMG reads again if it changes
#
# SMG_HOST         the address to listen on [127.0.0.1]
# SMG_PORT         the port [30000]
# SMG_METRICS_PORT the port of SMG's own metrics [29000]
# INFERNO_API_KEY  the key of the replicas. SMG sends this key to the replicas, and requires it from clients
set -eu
if [ -n "${SMG_WORKERS:-}" ]; then
  [ $# = 0 ] || { echo "smg.sh: pass URLs or SMG_WORKERS, not both" >&2; exit 2; }
  set -- --discovery-provider file --discovery-file "$SMG_WORKERS" --discovery-check-interval-secs 5
else
  [ $# -gt 0 ] || { echo "usage: smg.sh URL...  or  SMG_WORKERS=FILE smg.sh" >&2; exit 2; }
  set -- --worker-urls "$@"
fi

# cache_aware keeps a conversation on the replica that has its prefix. Overload protection spares replicas whose KV cache is
# nearly full or that have a queue; SMG reads both from /v1/loads. By default, SMG requests /health every 60 s and needs three
# failures, which takes longer than inferno's --drain-delay. By default, SMG's metrics listen on all addresses.
exec smg launch "$@" \
  --host "${SMG_HOST:-127.0.0.1}" --port "${SMG_PORT:-30000}" \
  --prometheus-host "${SMG_HOST:-127.0.0.1}" --prometheus-port "${SMG_METRICS_PORT:-29000}" \
  ${INFERNO_API_KEY:+--api-key "$INFERNO_API_KEY"} \
  --policy cache_aware --worker-overload-protection --load-monitor-interval 1 \
  --health-check-interval-secs 1 --health-check-timeout-secs 2 \
  --health-failure-threshold 1 --health-success-threshold 1 \
  --disable-tokenizer-autoload
