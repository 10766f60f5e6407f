# Guards one server directory: $1. Waits until the test process is gone, then kills every server
# that runs in it and removes it.
#
# Private servers: standard input is a pipe from the test process, and its end of file comes with
# the death of that process, however it died. Shared servers: $2 is the process id of the runner.
trap '' HUP INT QUIT TERM
PATH=$PATH:/usr/bin:/bin

if [ -n "$2" ]; then
    while kill -0 "$2" 2>/dev/null; do sleep 0.2; done
else
    while read -r _; do :; done
fi

# Reads the line of a process: "PID (NAME) STATE PARENT ...".
look_at() {
    { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
    name=${line%)*}
    name=${name#* (}
    set -- ${line##*) }
    parent=$2
}

# Removing the directory of a running `initdb` would leave shared memory behind; it ends soon.
tries=0
for file in "$1"/*/pid; do
    [ -f "$file" ] && read -r server <"$file" || continue
    while look_at "$server" && [ "$name" = initdb ] && [ "$tries" -lt 200 ]; do
        tries=$((tries + 1))
        sleep 0.05
    done
done

# After the rename no server can start: the launcher opens the pid file before it becomes the server, and
# can no longer open it. A server that is not found below never starts.
home=$1.gone
mv "$1" "$home" 2>/dev/null || exit 0

for file in "$home"/*/pid; do
    [ -f "$file" ] || continue
    # Opened, but perhaps not yet written.
    tries=0
    until read -r server <"$file" || [ "$tries" -ge 20 ]; do
        tries=$((tries + 1))
        sleep 0.05
    done
    look_at "$server" || continue
    # A paused Postgres has paused forks, which would never notice that their parent is gone.
    server_name=$name
    forks=
    for process in /proc/[0-9]*; do
        look_at "${process#/proc/}" || continue
        if [ "$parent $name" = "$server $server_name" ]; then forks="$forks ${process#/proc/}"; fi
    done
    kill -9 "$server" $forks 2>/dev/null
done

# A killed Postgres leaves a small piece of shared memory behind. Line 7 of its pid file: KEY ID.
for file in "$home"/*/data/postmaster.pid; do
    [ -f "$file" ] || continue
    set -- $(sed -n 7p "$file")
    if [ -n "$2" ]; then ipcrm -m "$2" 2>/dev/null; fi
done

# A dying server may still create a file while its directory is being removed.
tries=0
until rm -rf "$home" 2>/dev/null || [ "$tries" -ge 50 ]; do
    tries=$((tries + 1))
    sleep 0.1
done
