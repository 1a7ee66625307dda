# bash completion of epdctl: copy to /usr/share/bash-completion/completions/epdctl

_epdctl() {
    local verbs="status policy explain plan topology drain resume restart chat version" word=${COMP_WORDS[COMP_CWORD]} verb="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ " $verbs " == *" ${COMP_WORDS[i]} "* ]]; then verb=${COMP_WORDS[i]}; break; fi
    done
    case ${COMP_WORDS[COMP_CWORD - 1]} in
        --socket | --config | --model | --sysroot | --topology | --load | --save | -i | --image)
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -- "$word")
            return ;;
        --unit) mapfile -t COMPREPLY < <(compgen -W "request image patch" -- "$word"); return ;;
    esac
    case $verb in
        "") mapfile -t COMPREPLY < <(compgen -W "$verbs --socket --help" -- "$word") ;;
        status) mapfile -t COMPREPLY < <(compgen -W "--watch --json" -- "$word") ;;
        policy)
            mapfile -t COMPREPLY < <(compgen -W "budget earliest least-loaded round-robin gpu-only --unit --ratio --slack --json" \
                                             -- "$word") ;;
        explain) mapfile -t COMPREPLY < <(compgen -W "-n --json" -- "$word") ;;
        plan) mapfile -t COMPREPLY < <(compgen -W "--why --json --model --config --set --topology --sysroot" -- "$word") ;;
        topology) mapfile -t COMPREPLY < <(compgen -W "--save --load --sysroot --model --config --set" -- "$word") ;;
        chat) mapfile -t COMPREPLY < <(compgen -W "--image" -- "$word") ;;
        drain | resume | restart)
            # The names as the daemon that is found without --socket has them.
            mapfile -t COMPREPLY < <(compgen -W "$(epdctl status 2>/dev/null | grep -oE '^(encoder|pd)/[0-9]+')" -- "$word") ;;
    esac
}
complete -F _epdctl epdctl
