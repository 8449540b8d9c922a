# Read by other scripts: where packages come from. pip's settings hold for uv too, which does not read them itself.

pip_setting() { # from pip's environment variable or its configuration files
    local variable="PIP_$(echo "$1" | tr 'a-z-' 'A-Z_')"
    if [ -n "${!variable:-}" ]; then echo "${!variable}"; else "${VENV:-.venv}/bin/python" -m pip config get "global.$1" 2>/dev/null || true; fi
}

use_index_settings_of_pip() {
    local links index
    links="${UV_FIND_LINKS:-$(pip_setting find-links | tr -s ' \n' ',,')}"
    index="${UV_DEFAULT_INDEX:-$(pip_setting index-url)}"
    if [ -n "$links" ]; then export UV_FIND_LINKS="${links%,}"; fi
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
    export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}" # as pip does: company networks have certificates of their own
}
