
# The generated function takes a word to end at blanks. Bash also ends one at "=" and ":", so it is called with whole
# words, and what bash has already is taken off its answers. The last element of a comma list is completed by itself.
_pilot_agent_whole_words() {
    local line="${COMP_LINE:0:COMP_POINT}" typed element flag strip i
    local -a words answers=()
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    typed="${words[${#words[@]}-1]}"
    local seen="$2"
    [[ "$seen" == [=:] ]] && seen=""
    element="$typed"
    if [[ "$typed" == --*=* ]]; then
        flag="${typed%%=*}"
        element="${typed#*=}"
        words[${#words[@]}-1]="$flag"
        words+=("$element")
    fi
    case "${words[${#words[@]}-2]}" in
        --log_output_level|--log_stacktrace_level|--log_caller) element="${element##*,}" ;;
    esac
    words[${#words[@]}-1]="$element"
    COMP_WORDS=("${words[@]}")
    COMP_CWORD=$((${#words[@]} - 1))
    _pilot__agent "$1" "$element" "${words[COMP_CWORD-1]}"
    strip=$((${#typed} - ${#seen}))
    for i in "${COMPREPLY[@]}"; do
        i="${typed%"$element"}$i"
        answers+=("${i:strip}")
    done
    COMPREPLY=("${answers[@]}")
}

if [[ "${BASH_VERSINFO[0]}" -eq 4 && "${BASH_VERSINFO[1]}" -ge 4 || "${BASH_VERSINFO[0]}" -gt 4 ]]; then
    complete -F _pilot_agent_whole_words -o nosort -o bashdefault -o default pilot-agent
else
    complete -F _pilot_agent_whole_words -o bashdefault -o default pilot-agent
fi
