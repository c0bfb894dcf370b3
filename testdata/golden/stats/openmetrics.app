application/openmetrics-text; version=1.0.0; charset=utf-8
# TYPE http_requests counter
# UNIT http_requests_seconds seconds
http_requests_total{code="200"} 1027.0 # {trace_id="a"} 1.0
# EOF
