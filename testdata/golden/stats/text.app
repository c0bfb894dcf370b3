text/plain; version=0.0.4; charset=utf-8
# HELP http_requests_total Requests.
# TYPE http_requests_total counter
http_requests_total{code="200"} 1027 1395066363000
http_requests_total{code="400"} 3
# TYPE temp gauge
temp -Inf
