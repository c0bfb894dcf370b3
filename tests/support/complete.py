"""Types into a real bash on a terminal and asks readline for every completion: complete.py AGENT COMPLETIONS < lines.

Prints each line with all completions put in its place (readline's insert-completions), one line each.
"""
import os
import pty
import select
import sys
import time

agent, completions = sys.argv[1:]
lines = [line.rstrip("\n") for line in sys.stdin]

pid, fd = pty.fork()
if pid == 0:
    os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"],
               {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "$ ", "INPUTRC": "/dev/null", "COLUMNS": "30000"})


def expect(marker):
    """Reads until the marker; a bash that stays silent is a failure."""
    text = ""
    end = time.monotonic() + 30
    while marker not in text:
        left = end - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            sys.exit(f"bash did not answer with {marker!r}: {text!r}")
        text += os.read(fd, 65536).decode()
    return text


def send(text):
    os.write(fd, text.encode())


setup = [
    "stty cols 30000",
    "bind 'set bell-style none'",
    "bind 'set enable-bracketed-paste off'",
    "bind 'set completion-query-items -1'",
    """bind '"\\C-g": insert-completions'""",
    """bind -x '"\\C-t": printf "\\n{%s}END\\n" "$READLINE_LINE"'""",
    f"pilot-agent() {{ {agent} \"$@\"; }}",
    f"source {completions}",
]
for line in setup:
    send(line + "\n")
send("echo SET''UP\n")
expect("SETUP")
for line in lines:
    send(line + "\x07\x14")
    answer = expect("}END")
    print(answer[answer.rindex("\n{") + 2:answer.rindex("}END")])
    send("\x15")
send("exit\n")
os.waitpid(pid, 0)
