text/plain
app_up 1