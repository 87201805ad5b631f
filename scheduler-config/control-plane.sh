#!/bin/sh
# Writes what a kube-scheduler of the control plane needs to call idlegpu: its configuration, with the
# address of the Service, and its certificate, from the Secret. Run it on each control plane node.
#
#   scheduler-config/control-plane.sh [FOLDER]     FOLDER: unless set, /etc/kubernetes/idlegpu
#
# Run it again at any time: it replaces a renewed certificate, which kube-scheduler rereads by itself, and
# leaves an existing configuration as it is. systemd/ runs it every day. kubectl must reach the cluster
# (KUBECONFIG).
#
# SCHEDULER_KUBECONFIG: kube-scheduler's own kubeconfig; unless set, kubeadm's.
set -eu
folder=${1:-/etc/kubernetes/idlegpu}
config=$folder/kube-scheduler.yaml
shipped=$(dirname "$0")/kube-scheduler.yaml
secret=idlegpu-kube-scheduler-tls

fail() {
    echo "control-plane.sh: $1" >&2
    exit 1
}

address=$(kubectl -n idlegpu get service idlegpu-extender -o jsonpath='{.spec.clusterIP}')
[ -n "$address" ] || fail "the Service idlegpu/idlegpu-extender has no address"
case $address in *:*) address="[$address]" ;; esac

umask 077
mkdir -p "$folder"
for file in ca.crt tls.crt tls.key; do
    kubectl -n idlegpu get secret "$secret" -o go-template="{{index .data \"$file\" | base64decode}}" >"$folder/.$file"
    [ -s "$folder/.$file" ] || fail "the Secret idlegpu/$secret has no $file"
done
if [ -f "$folder/ca.crt" ] && ! cmp -s "$folder/.ca.crt" "$folder/ca.crt"; then
    echo "the CA changed: restart kube-scheduler, which reads its CA once (docs/install.md, Another CA)"
fi
for file in ca.crt tls.crt tls.key; do
    if cmp -s "$folder/.$file" "$folder/$file"; then
        rm "$folder/.$file"
    else
        mv "$folder/.$file" "$folder/$file"
        echo "wrote $folder/$file"
    fi
done

if [ ! -f "$config" ]; then
    [ -f "$shipped" ] || fail "$shipped is missing: run the script from the folder scheduler-config of a checkout once"
    kubeconfig=${SCHEDULER_KUBECONFIG:-/etc/kubernetes/scheduler.conf}
    sed "s#FIXED_ADDRESS#$address#; s#/etc/kubernetes/scheduler.conf#$kubeconfig#; s#/etc/kubernetes/idlegpu/#$folder/#" \
        "$shipped" >"$config.new"
    mv "$config.new" "$config"
    echo "wrote $config"
fi
grep -qF "//$address:" "$config" ||
    fail "$config does not name the Service's address $address: correct urlPrefix, and restart kube-scheduler"
