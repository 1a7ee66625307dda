# bash completion of epdctl and epdd: copy to /usr/share/bash-completion/completions/epdctl, and link epdd there to it

_epdctl() {
    local verbs="status policy explain plan topology drain resume restart reload chat version" word=${COMP_WORDS[COMP_CWORD]} verb="" i
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

# Models that the Hub's local cache has, as ORG/NAME.
_epdd_models() {
    local cache=${HF_HUB_CACHE:-${HF_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/huggingface}/hub} folder name
    for folder in "$cache"/models--*--*; do
        [ -d "$folder" ] || continue
        name=${folder##*/models--}
        echo "${name/--//}"
    done
}

_epdd() {
    local verbs="serve check pull plan" word=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} options="" models=""
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "$verbs --version --help" -- "$word")
        return
    fi
    case ${COMP_WORDS[COMP_CWORD - 1]} in
        --config | --topology | --sysroot)
            compopt -o filenames
            mapfile -t COMPREPLY < <(compgen -f -- "$word")
            return ;;
        --emulate) mapfile -t COMPREPLY < <(compgen -W "laptop router-table xeon6747p-5xl40s" -f -- "$word"); return ;;
        --model) models=1 ;;
        --revision | --host | --port | --set) return ;;
    esac
    case $verb in
        serve) models=1 options="--revision --host --port --config --set --emulate --plan" ;;
        check) models=1 options="--revision --json" ;;
        pull) models=1 options="--revision" ;;
        plan) options="--why --json --model --config --set --topology --sysroot" ;;
    esac
    if [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
    elif [[ $models ]]; then
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -W "$(_epdd_models)" -- "$word"; [ "$verb" = pull ] || compgen -d -- "$word")
    else
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
    fi
}
complete -F _epdd epdd
