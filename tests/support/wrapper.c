/* A pilot-agent that does not do what a pilot-agent does: AGENT is the program it becomes, and ON_TRIAL or EXTRA is what
 * that is given beside its words; alone, where AGENT is no pilot-agent. */
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char *words[argc + 2];
    int trial = argc > 1 && strcmp(argv[1], "__take-over") == 0, n = 1;
    char *more = trial ? ON_TRIAL : EXTRA;
    words[0] = argv[0];
    if (!trial || !*more)
        for (; n < argc; n++)
            words[n] = argv[n];
    if (*more)
        words[n++] = more;
    words[n] = NULL;
    execv(AGENT, words);
    return 1;
}
